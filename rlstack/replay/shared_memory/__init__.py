"""Replay in memory that the processes of one machine share."""

from rlstack.replay.shared_memory.buffer import SharedMemReplayBuffer
from rlstack.replay.shared_memory.handle import SharedMemHandle
from rlstack.replay.shared_memory.writer import SharedMemWriter

__all__ = ["SharedMemHandle", "SharedMemReplayBuffer", "SharedMemWriter"]
