"""How other processes find a shared replay buffer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlstack.replay.base import ReplayClosedError, ReplayConfig
from rlstack.replay.shared_memory.block import Block
from rlstack.replay.shared_memory.steps import SharedSteps
from rlstack.replay.shared_memory.writer import SharedMemWriter
from rlstack.types import Transition

NAME = "SharedMemReplayBuffer"  # in messages


class SharedMemHandle(NamedTuple):
    """Names a buffer and says what is in it; small, and pickles."""

    name: str  # of the block
    cfg: ReplayConfig
    num_envs: int
    spec: Transition

    def attach(self) -> SharedMemWriter:
        """Returns a writer that takes each environment when it first adds a step of it.

        Raises:
          ReplayClosedError: the owner has closed the buffer, or ended.
        """
        try:
            block = Block.attach(self.name)
        except FileNotFoundError:
            raise ReplayClosedError(
                f"{NAME}.attach: the owner must be there; {self.name} is closed, or was killed."
            ) from None
        shared = SharedSteps(self.cfg, self.num_envs, self.spec, block)
        return SharedMemWriter(self.cfg, self.num_envs, shared, NAME)

    def writer(self, rank: int, num_actors: int) -> SharedMemWriter:
        """Returns the writer of one of ``num_actors`` actors, who share the environments evenly.

        Raises:
          ValueError: they cannot, or another process that lives has that rank.
          ReplayClosedError: as for ``attach``.
        """
        if self.num_envs % num_actors or not 0 <= rank < num_actors:
            raise ValueError(
                f"{NAME}.writer: rank must be one of num_actors, which must divide the "
                f"{self.num_envs} environments; got {rank} of {num_actors}."
            )
        count = self.num_envs // num_actors
        writer = self.attach()
        writer.claim(np.arange(rank * count, (rank + 1) * count))
        return writer
