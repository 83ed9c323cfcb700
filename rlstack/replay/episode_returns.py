"""The return of the episode that each stored step belongs to."""

from __future__ import annotations

import numpy as np

from rlstack.replay.step_counter import restore_into
from rlstack.replay.storage import StepRing
from rlstack.types import PyTree, StepType


class EpisodeReturns:
    """Returns of episodes by step, computed from the rewards in a ring of steps.

    A step's return is NaN until its episode has ended. It stays NaN if the first steps of the
    episode were never seen: after a gap, or if they were overwritten before `update` was called.
    """

    def __init__(self, rows: int, num_envs: int):
        """Makes the array for the last ``rows`` steps of each environment."""
        self._values = np.full((rows, num_envs), np.nan, np.float32)
        self._next = np.zeros(num_envs, np.int64)  # the next step to read
        self._begin = np.zeros(num_envs, np.int64)  # the first step of the running episode
        self._unbroken = np.zeros(num_envs, np.int64)  # the last gap seen
        self._sum = np.full(num_envs, np.nan)  # of the running episode's rewards

    def update(self, ring: StepRing, steps: np.ndarray, unbroken: np.ndarray) -> None:
        """Reads the steps that were added since the last call.

        Args:
          ring: the steps.
          steps: number of steps of each environment, [num_envs].
          unbroken: the first step after each environment's last gap, [num_envs].
        """
        rows = len(self._values)
        first = np.minimum(np.maximum(unbroken, steps - rows), steps)
        lost = (first > self._next) | (unbroken != self._unbroken)
        self._next = np.maximum(self._next, first)
        self._begin[lost] = self._next[lost]
        self._unbroken[:] = unbroken
        self._sum[lost] = np.nan
        while (due := np.flatnonzero(self._next < steps)).size:
            at = self._next[due]
            step_type = ring.step_type[at % ring.rows, due]
            begins = step_type == StepType.FIRST
            self._begin[due[begins]] = at[begins]
            self._sum[due[begins]] = 0.0
            self._sum[due] += ring.reward[at % ring.rows, due]
            self._values[at % rows, due] = np.nan
            ends = step_type == StepType.LAST
            for env, end in zip(due[ends].tolist(), at[ends].tolist(), strict=True):
                episode = np.arange(max(self._begin[env], end - rows + 1), end + 1)
                self._values[episode % rows, env] = self._sum[env]
            self._next[due] += 1

    def at(self, steps: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the returns of the episodes of these steps, [n] float32."""
        return self._values[steps % len(self._values), env_ids]

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        return [array.copy() for array in self._state()]

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        for array, saved in zip(self._state(), tree, strict=True):
            restore_into(array, saved, "the returns of all environments")

    def _state(self) -> list[np.ndarray]:
        return [self._values, self._next, self._begin, self._unbroken, self._sum]
