"""Steps whose action mask marks no action as legal.

`rlstack.distributions` lets such a row take any action, because padding must stay finite. In the
step of an environment it is a mistake, so pools and compiled loops count it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import jax
import numpy as np
from dm_env import specs

from rlstack.specs import ACTION_MASK
from rlstack.types import Array, EnvSpec, StepType, TimeStep

COUNTER = "masks_without_choice"  # the name of their number in logs


def without_choice(spec: EnvSpec) -> Callable[[TimeStep], Array] | None:
    """Returns a function that finds the steps in which some choice has no legal value.

    Args:
      spec: the spec of the environments.

    Returns:
      A function from steps ``[B, ...]``, of numpy or of JAX, to bool ``[B]``. Steps that end an
      episode do not count, for nobody acts on them. None if the observation has no action mask of
      the action's size.
    """
    if not isinstance(spec.observation, Mapping) or ACTION_MASK not in spec.observation:
        return None
    actions, structure = jax.tree.flatten(spec.action)
    try:
        masks = structure.flatten_up_to(spec.observation[ACTION_MASK])
    except ValueError:
        return None
    parts = [
        (i, sizes)
        for i, (action, mask) in enumerate(zip(actions, masks, strict=True))
        if (sizes := _sizes(action)) and _fits(getattr(mask, "shape", None), sizes)
    ]
    if not parts:
        return None

    def find(timestep: TimeStep) -> Array:
        leaves = structure.flatten_up_to(timestep.observation[ACTION_MASK])
        found = timestep.step_type != int(StepType.LAST)
        chosen = None
        for i, sizes in parts:
            legal = _every_choice_is_possible(leaves[i], sizes)
            chosen = legal if chosen is None else chosen & legal
        return found & ~chosen  # type: ignore[operator]

    return find


def no_choice_warning(env_id: int, name: str, when: str) -> str:
    """Returns the warning of the first step without a legal action."""
    return (
        f"Env {env_id} ({name}), {when}: the action mask marks no action as legal, so all actions "
        f"count as legal. Mend the mask; env/{COUNTER} in metrics.jsonl counts such steps."
    )


def _sizes(action: specs.Array) -> list[int]:
    """Returns the number of values of each choice of an action; none for real numbers."""
    if isinstance(action, specs.DiscreteArray):
        return [int(action.num_values)]
    if not isinstance(action, specs.BoundedArray) or not np.issubdtype(action.dtype, np.integer):
        return []
    sizes = action.maximum.astype(np.int64) - action.minimum + 1
    return np.broadcast_to(sizes, action.shape or (1,)).ravel().tolist()


def _fits(shape: object, sizes: list[int]) -> bool:
    """Returns whether a mask marks the values of all choices, flat or with an axis of choices."""
    alike = len(set(sizes)) == 1
    return shape == (sum(sizes),) or (alike and shape == (len(sizes), sizes[0]))


def _every_choice_is_possible(mask: Array, sizes: list[int]) -> Array:
    """Returns bool ``[B]`` for a mask ``[B, sum of sizes]``, or ``[B, K, A]``."""
    if len(set(sizes)) == 1:
        return mask.reshape((len(mask), len(sizes), sizes[0])).any(-1).all(-1)
    ends = np.cumsum(sizes)
    possible = mask[:, : ends[0]].any(-1)
    for start, end in itertools.pairwise(ends):
        possible &= mask[:, start:end].any(-1)
    return possible
