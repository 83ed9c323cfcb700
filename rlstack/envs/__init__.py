"""Pools of environments: ``SyncEnv`` and ``AsyncEnv``, over EnvPool, a loop, threads or processes.

The two names are imported on first use, because worker processes import this package too and must
not import JAX.

May import: rlstack, rlstack.imports, rlstack.specs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstack.envs.pool import AsyncEnv, SyncEnv

__all__ = ["AsyncEnv", "SyncEnv"]


def __getattr__(name: str) -> type[AsyncEnv] | type[SyncEnv]:
    if name in __all__:
        from rlstack.envs import pool

        return getattr(pool, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
