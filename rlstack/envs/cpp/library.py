"""Imports EnvPool, without Matplotlib. No other module imports EnvPool.

EnvPool 1.2 draws its environments of Jumanji with Matplotlib. It imports Matplotlib at once, which
takes half of the time that importing EnvPool takes. Here Matplotlib is imported when something is
drawn.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

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
        with _drawing_deferred():
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


@contextlib.contextmanager
def _drawing_deferred() -> Iterator[None]:
    """Replaces the module that draws with a stand-in while the body imports EnvPool."""
    if _DRAWS in sys.modules:
        yield
        return
    sys.modules[_DRAWS] = _Deferred(_DRAWS)
    try:
        yield
    finally:
        del sys.modules[_DRAWS]


class _Deferred(ModuleType):
    """A stand-in for a module, which it imports when one of its functions is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules.get(_DRAWS) is self:  # EnvPool is being imported, and draws nothing
                return None
            return getattr(importlib.import_module(_DRAWS), name)(*args, **kwargs)

        return call
