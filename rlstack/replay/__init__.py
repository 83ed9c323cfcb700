"""Replay: one interface (``base``), and the buffers that implement it.

May import: rlstack, rlstack.rpc.
"""

from rlstack.replay.base import (
    ReplayBuffer,
    ReplayClosedError,
    ReplayConfig,
    ReplayTimeoutError,
    Sample,
)
from rlstack.replay.in_process import InProcessReplay
from rlstack.replay.memory import bytes_needed
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
