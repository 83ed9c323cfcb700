"""Replay: one interface (``base``), and the buffers that implement it.

May import: rlstack, rlstack.configs, rlstack.rpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayBuffer, ReplayClosedError, ReplayTimeoutError, Sample
from rlstack.replay.in_process import InProcessReplay
from rlstack.replay.memory import bytes_needed

if TYPE_CHECKING:
    from rlstack.replay.shared_memory import (
        SharedMemHandle,
        SharedMemReplayBuffer,
        SharedMemWriter,
    )

__all__ = [
    "InProcessReplay",
    "ReplayBuffer",
    "ReplayClosedError",
    "ReplayConfig",
    "ReplayTimeoutError",
    "Sample",
    "SharedMemHandle",
    "SharedMemReplayBuffer",
    "SharedMemWriter",
    "bytes_needed",
]


def __getattr__(name: str) -> object:
    """Imports the buffer in shared memory when it is first used."""
    if name not in ("SharedMemHandle", "SharedMemReplayBuffer", "SharedMemWriter"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlstack.replay import shared_memory

    return getattr(shared_memory, name)
