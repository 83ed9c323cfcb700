"""Batches of environments: ``SyncEnv`` and ``AsyncEnv`` over four ways to run them.

Names are resolved on first use, because worker processes import this package too and must not pay
for JAX.

May import: rlstack.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstack.envs.async_pool import AsyncEnv
    from rlstack.envs.pool import SyncEnv

__all__ = ["AsyncEnv", "SyncEnv"]
_MODULES = {"AsyncEnv": "async_pool", "SyncEnv": "pool"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"rlstack.envs.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
