"""Replay: one interface (``base``), and the buffers that implement it.

May import: rlstack, rlstack.configs, rlstack.imports, rlstack.rpc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstack.configs.replay import ReplayConfig
from rlstack.imports.deferred import on_first_use
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

_NAMES = ("SharedMemHandle", "SharedMemReplayBuffer", "SharedMemWriter")
__getattr__ = on_first_use(__name__, dict.fromkeys(_NAMES, "shared_memory"))
