"""Specs of environments in which the learner chooses the levels.

An action then has an entry ``level`` beside the environment's own: the level of the episode that
begins where the action follows LAST. It is ignored elsewhere. The extras of each step have an entry
``level``: the level of its episode. Worker processes import this module, so it needs no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from dm_env import specs

from rlstack.checks import EnvError

ACTION, LEVEL = "action", "level"


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
