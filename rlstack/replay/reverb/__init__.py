"""Replay on a Reverb server."""

from rlstack.replay.reverb.buffer import ReverbReplayBuffer
from rlstack.replay.reverb.server import ReverbServer

__all__ = ["ReverbReplayBuffer", "ReverbServer"]
