"""A replay buffer whose stacked frames are stored once each: `FrameStacks` around a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rlstack.replay.base import ReplayBuffer, ReplayConfig, Sample
from rlstack.replay.frame_stack import FrameStacks
from rlstack.types import Logs, PyTree, Transition

MakeBuffer = Callable[[ReplayConfig, Transition], ReplayBuffer]


class StackedReplay:
    """A ``ReplayBuffer``; see there. Takes stacks apart on the way in, joins them on the way out.

    The first k - 1 items of an environment, and after a gap, are not there: their first stacks hold
    frames that never came. Batches are copies in reused memory, fifo's too.
    """

    def __init__(
        self, cfg: ReplayConfig, num_envs: int, spec: Transition, make_buffer: MakeBuffer
    ) -> None:
        """Makes the buffer.

        Args:
          cfg: the table, with ``frame_stack``.
          num_envs: environments that write.
          spec: of one environment's step, with stacks.
          make_buffer: makes the buffer of what is stored, from its config and its spec.
        """
        self._stacks = FrameStacks(cfg, num_envs, spec)
        self.stored = make_buffer(self._stacks.cfg, self._stacks.spec)

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments."""
        self.stored.add(env_ids, self._stacks.split(env_ids, transition), timeout)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Says that the next steps of these environments do not follow on those before."""
        self._stacks.gap(env_ids)
        self.stored.gap(env_ids)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every completed item can be sampled."""
        self.stored.flush(timeout)

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        return self.stored.can_sample(batch_size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws items."""
        return self._stacks.join(self.stored.sample(batch_size, timeout))

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys."""
        self.stored.update_priorities(keys, priorities)

    def set_params_version(self, version: int) -> None:
        """Tells the version of the learner's params."""
        self.stored.set_params_version(version)

    def make_dataset(self) -> Iterator[Sample]:
        """Yields samples, as the buffer around which this is does."""
        return map(self._stacks.join, self.stored.make_dataset())

    def stats(self) -> Logs:
        """Returns sizes, counters and lag."""
        return self.stored.stats()

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays."""
        return {"stored": self.stored.save(), "stacks": self._stacks.save()}

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned."""
        self.stored.load(tree["stored"])
        self._stacks.load(tree["stacks"])

    def close(self) -> None:
        """Frees the storage."""
        self.stored.close()
