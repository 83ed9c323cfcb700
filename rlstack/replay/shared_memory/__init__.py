"""Replay in memory that the processes of one machine share."""

from rlstack.replay.shared_memory.buffer import SharedMemReplayBuffer
from rlstack.replay.shared_memory.writer import SharedMemHandle, SharedMemWriter

__all__ = ["SharedMemHandle", "SharedMemReplayBuffer", "SharedMemWriter"]
