"""What a learner needs of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from rlstack.types import Batch


class SampleLike(Protocol):
    """A replay buffer's sample: a batch and the keys of its items."""

    @property
    def batch(self) -> Batch:
        """Trajectory ``[T+1, B, ...]`` and weights ``[B]``."""

    @property
    def keys(self) -> np.ndarray:
        """The keys of the items in replay, ``[B]`` uint64."""


class ReplayReader(Protocol):
    """The reader's side of a ReplayBuffer."""

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets new priorities of items."""

    def set_params_version(self, version: int) -> None:
        """Sets the version of the newest params, which staleness is measured against."""

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[SampleLike]:
        """Yields samples until `stop` returns True or the buffer is closed."""
