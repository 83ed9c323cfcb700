"""Imports EnvPool, without Matplotlib. No other module imports EnvPool.

EnvPool 1.2 draws its environments of Jumanji with Matplotlib. It imports Matplotlib at once, which
takes half of the time that importing EnvPool takes. Here Matplotlib is imported when something is
drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rlstack.imports.deferred import deferred

_DRAWS = "envpool.jumanji.jumanji_official_render"  # the module that imports Matplotlib


def load() -> ModuleType | None:
    """Returns the EnvPool module, or None if EnvPool is not installed.

    Raises:
      OSError: EnvPool is installed, but it needs a library that this system lacks.
    """
    with contextlib.suppress(ImportError):
        # Older versions of EnvPool import gym, which prints a deprecation notice on stderr.
        from gym_notices import notices

        notices.notices.clear()
    try:
        with deferred(_DRAWS):
            import envpool
    except ModuleNotFoundError as error:
        if error.name == "envpool":
            return None
        raise
    except ImportError as error:
        raise OSError(
            f"EnvPool is installed, but cannot be imported: {error}. If it is a library of the "
            "system, install it (on Debian and Ubuntu: apt install libegl1 libopengl0). "
            "Environments of Gymnasium do not need EnvPool: --env.type for_loop."
        ) from error
    return envpool


def names() -> list[str]:
    """Returns the names of EnvPool's environments; empty if EnvPool is not installed.

    Raises:
      OSError: see `load`.
    """
    envpool = load()
    return [] if envpool is None else list(envpool.list_all_envs())


def seats(name: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a name for each seat of an environment of EnvPool; one for an environment of one.

    Args:
      name: an EnvPool id.
      options: options of the environment.

    Raises:
      ValueError: an option changes the number of agents, which EnvPool would not survive.
    """
    envpool = load()
    # What EnvPool registers for a name. `make_spec` would tell too, but takes 80 ms for Atari.
    registered = envpool.registration.registry.specs[name][2] if envpool else {}
    config = {**registered, **options}
    players = config.get("max_num_players", 1)
    agents = config.get("n_agents", players)
    if agents != players:
        raise ValueError(
            f"EnvPool: {name} must have the number of agents in its name, {players}; got "
            f"n_agents={agents}. Leave n_agents out, or use the name of another game."
        )
    return tuple(f"player_{i}" for i in range(players)) if players > 1 else ("0",)
