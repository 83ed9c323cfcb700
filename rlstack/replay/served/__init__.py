"""Replay in a separate process: a `ReplayService` holds the table, others write and sample."""

from rlstack.replay.served.buffer import ServedReplayBuffer
from rlstack.replay.served.service import ReplayService

__all__ = ["ReplayService", "ServedReplayBuffer"]
