"""From a network's output to the distribution that fits an action spec."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.distributions.continuous import Normal, TanhNormal
from rlstack.distributions.discrete import categorical, multi_categorical
from rlstack.distributions.joint import Distribution, Joint
from rlstack.types import Array, PyTree

# Where SAC clips the log standard deviation of its policy (Haarnoja et al. 2018, the authors'
# code).
LOG_STD_RANGE = (-20.0, 2.0)


def num_parameters(action_spec: PyTree) -> int:
    """Returns how many numbers a row ``from_parameters`` needs for ``action_spec``.

    A for a choice of A, the sum of the sizes for several choices, 2 D for a float action [D]; for a
    nest of specs the sum, in the order of ``jax.tree.leaves``.
    """
    return sum(_width(spec) for spec in jax.tree.leaves(action_spec))


def from_parameters(
    action_spec: PyTree, parameters: Array, mask: PyTree = None, *, squash: bool = False
) -> Distribution:
    """Turns a network's output into the distribution that fits ``action_spec``.

    Args:
      action_spec: a ``dm_env.specs`` array or a nest (dict, tuple, ...) of them. DiscreteArray (or
        a scalar integer BoundedArray from 0): ``Categorical``. Integer BoundedArray [K]:
        ``MultiCategorical``. Float array [D]: ``Normal`` of concatenated mean and log_std, or
        ``TanhNormal`` with ``squash``. A nest: ``Joint``.
      parameters: [..., num_parameters(action_spec)].
      mask: legal discrete choices, [..., A] or [..., sum of sizes]; for a nest the same nest of
        masks, with None where there is none.
      squash: bounds float actions by tanh to the spec's bounds, which must be finite, and clips
        log_std to ``LOG_STD_RANGE`` as SAC does.

    Raises:
      ValueError: a spec without a distribution, a width that does not fit, a mask on a float
        action.
    """
    parameters = jnp.asarray(parameters, jnp.float32)
    width = num_parameters(action_spec)
    if parameters.ndim == 0 or parameters.shape[-1] != width:
        raise ValueError(
            f"from_parameters: this action spec needs parameters [..., {width}]; got shape "
            f"{parameters.shape}. Size the head with num_parameters(action_spec)."
        )
    if isinstance(action_spec, specs.Array):
        return _from_spec(action_spec, parameters, mask, squash)
    leaves, treedef = jax.tree.flatten(action_spec)
    masks = [None] * len(leaves) if mask is None else treedef.flatten_up_to(mask)
    parts = jnp.split(parameters, np.cumsum([_width(spec) for spec in leaves])[:-1].tolist(), -1)
    return Joint(
        jax.tree.unflatten(
            treedef,
            [_from_spec(*row, squash) for row in zip(leaves, parts, masks, strict=True)],
        )
    )


def _from_spec(spec: specs.Array, parameters: Array, mask: Any, squash: bool) -> Distribution:
    """``from_parameters`` for one array spec whose width has been checked."""
    if np.issubdtype(spec.dtype, np.integer):
        sizes = _sizes(spec)
        if mask is not None and jnp.shape(mask)[-1:] != (sum(sizes),):
            raise ValueError(
                f"from_parameters: the mask of {spec} must be [..., {sum(sizes)}]; got shape "
                f"{jnp.shape(mask)}."
            )
        if not spec.shape:
            return categorical(parameters, mask)
        minimum = np.broadcast_to(spec.minimum, spec.shape)
        return multi_categorical(parameters, sizes, minimum, mask)
    if mask is not None:
        raise ValueError(f"from_parameters: only discrete actions take a mask; got one for {spec}.")
    mean, log_std = jnp.split(parameters, 2, axis=-1)
    if not squash:
        return Normal(mean, log_std)
    low, high = (getattr(spec, name, np.inf) for name in ("minimum", "maximum"))
    if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high)) and np.all(low < high)):
        raise ValueError(
            f"from_parameters: squash needs finite bounds with minimum < maximum; got {spec}. "
            "Use squash=False."
        )
    low, high = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), mean.shape) for x in (low, high))
    return TanhNormal(mean, jnp.clip(log_std, *LOG_STD_RANGE), low, high)


def _width(spec: specs.Array) -> int:
    """Number of parameters of one array spec."""
    if not isinstance(spec, specs.Array):
        raise ValueError(f"num_parameters: an action spec is a nest of dm_env specs; got {spec!r}.")
    if np.issubdtype(spec.dtype, np.integer):
        return sum(_sizes(spec))
    if not np.issubdtype(spec.dtype, np.floating) or len(spec.shape) != 1:
        raise ValueError(
            f"num_parameters: a continuous action is a float array of rank 1; got {spec}. "
            "Flatten it in an environment adapter."
        )
    return 2 * spec.shape[0]


def _sizes(spec: specs.Array) -> list[int]:
    """Number of values of every component of an integer spec."""
    if isinstance(spec, specs.DiscreteArray):
        return [int(spec.num_values)]
    if not isinstance(spec, specs.BoundedArray) or len(spec.shape) > 1:
        raise ValueError(
            f"num_parameters: an integer action is a DiscreteArray or a BoundedArray of rank 0 or "
            f"1; got {spec}. Flatten or bound it in an environment adapter."
        )
    if not spec.shape and int(spec.minimum) != 0:
        raise ValueError(
            f"num_parameters: a scalar integer action counts from 0; got {spec}. "
            "Shift it in an environment adapter, or give it shape [1]."
        )
    sizes = np.broadcast_to(spec.maximum.astype(np.int64) - spec.minimum + 1, spec.shape or (1,))
    return [int(size) for size in sizes]
