"""The meaning of environment specs: names of entries, bounds of real numbers, levels of episodes.

Worker processes of environments import this module, so it must not import JAX. Masks of actions
need it, and are in `rlstack.specs.masks`.

If the learner chooses the levels, an action has an entry ``level`` beside the environment's own:
the level of the episode that begins where the action follows LAST. It is ignored elsewhere. The
extras of each step have an entry ``level``: the level of its episode.

Pure.

May import: rlstack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from dm_env import specs

from rlstack.checks import EnvError

# Entries of dict observations.
ACTION_MASK = "action_mask"  # marks the legal actions
CRITIC_STATE = "critic_state"  # only critics see it: a game's state
SEAT = "seat"  # the number of the seat
# Entries of the extras of joint rows, one number for each seat. ALIVE is 1 while a seat's
# game goes on: its action counts, or its value where a time limit ends the game.
ALIVE, REWARDS = "alive", "rewards"
# Entries of actions with a level, and of the extras.
ACTION, LEVEL = "action", "level"


def with_open_bounds(spec: specs.Array) -> specs.Array:
    """Returns the spec, with infinity for bounds that stand for none.

    Environments write "no bound" as infinity, or as the largest number of the dtype or one near
    it. A bound of half the largest number or more counts as none, so that the difference of two
    bounds is finite. Specs of integers have no such bounds. A spec without any bound becomes a
    plain array.
    """
    if not isinstance(spec, specs.BoundedArray) or not np.issubdtype(spec.dtype, np.floating):
        return spec
    most = np.finfo(spec.dtype).max / 2
    low = np.where(spec.minimum <= -most, -np.inf, spec.minimum)
    high = np.where(spec.maximum >= most, np.inf, spec.maximum)
    if np.isinf(low).all() and np.isinf(high).all():
        return specs.Array(spec.shape, spec.dtype, spec.name)
    low, high = low.astype(spec.dtype), high.astype(spec.dtype)
    return specs.BoundedArray(spec.shape, spec.dtype, low, high, spec.name)


def has_finite_bounds(spec: specs.Array) -> bool:
    """Returns whether every number of a spec has two bounds, the lower one below the upper one."""
    opened = with_open_bounds(spec)
    if not isinstance(opened, specs.BoundedArray):
        return False
    low, high = opened.minimum, opened.maximum
    return bool(np.isfinite(low).all() and np.isfinite(high).all() and np.all(low < high))


def with_level(action: Any, extras: Any, number: int, where: str) -> tuple[Any, Any]:
    """Returns the specs of action and extras with a level.

    Args:
      action: the spec of the environment's action.
      extras: the spec of its extras, a dict or ().
      number: the number of levels.
      where: the name of the environment in errors.

    Raises:
      EnvError: the extras are no dict, or have a ``level`` already.
    """
    level = specs.DiscreteArray(number, np.int32, LEVEL)
    own = extras if isinstance(extras, Mapping) else {} if extras == () else None
    taken = isinstance(action, Mapping) and LEVEL in action
    if own is None or LEVEL in own or taken:
        raise EnvError(
            f"{where}: with levels the extras must be a dict, and neither they nor actions may "
            f"have an entry {LEVEL!r}, which the pool adds; got {extras!r:.200} and "
            f"{action!r:.200}. Rename the entry, or set env.levels 0."
        )
    return {ACTION: action, LEVEL: level}, {**own, LEVEL: level}


def own_action(action: Any) -> Any:
    """Returns the environment's own part of an action, or of its spec, without a level."""
    has_level = isinstance(action, Mapping) and set(action) == {ACTION, LEVEL}
    return action[ACTION] if has_level else action
