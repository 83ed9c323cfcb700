"""Imports EnvPool, without Matplotlib. No other module imports EnvPool.

EnvPool 1.2 draws its environments of Jumanji with Matplotlib. It imports Matplotlib at once, which
takes half of the time that importing EnvPool takes. Here Matplotlib is imported when something is
drawn.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

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
