"""Counts the steps of each environment, and stores where its stream was broken."""

from __future__ import annotations

import numpy as np

from rlstack.types import PyTree


class StepCounter:
    """The number of steps of each environment; one number while all are at the same step."""

    def __init__(self, num_envs: int):
        self.envs = np.arange(num_envs)
        self.together, self.step = True, 0  # `step` is valid only while `together`
        self.steps = np.zeros(num_envs, np.int64)  # valid otherwise
        self.unbroken = np.zeros(num_envs, np.int64)  # the first step after the last gap
        self.last_gap = 0  # the largest of `unbroken`
        self._mark = np.zeros(num_envs, np.int64)
        self._bound = np.uint64(num_envs)

    def check_ids(self, where: str, env_ids: np.ndarray) -> np.ndarray | None:
        """Returns distinct ids, or None for all environments in order.

        Raises:
          ValueError: an id is out of range, repeated, or not an integer.
        """
        ids, num_envs = np.asarray(env_ids), len(self.envs)
        if ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids) <= num_envs:
            order = self.envs[: len(ids)]
            if len(ids) == num_envs and np.count_nonzero(ids == order) == num_envs:
                return None
            unsigned = ids.astype(np.uint64)  # negative ids become large ones
            if np.count_nonzero(unsigned < self._bound) == len(ids):
                self._mark[ids] = order  # with equal ids, only the last one keeps its mark
                if np.count_nonzero(self._mark[ids] == order) == len(ids):
                    return ids
        raise ValueError(
            f"{where}: env_ids must be a vector of distinct ints in 0..{num_envs - 1}; got "
            f"{ids.dtype} {ids.tolist()!r:.200}. Pass None for all environments in order."
        )

    def check_own_ids(
        self, where: str, env_ids: np.ndarray | None, first: int
    ) -> np.ndarray | None:
        """Returns distinct ids relative to ``first``, this counter's first environment.

        None stands for all environments in order, in the argument and in the result.

        Raises:
          ValueError: the ids are not valid, see `check_ids`.
        """
        if env_ids is None:
            return None
        ids = np.asarray(env_ids)
        if first and ids.dtype.kind in "iu":
            ids = ids.astype(np.int64) - first
        try:
            return self.check_ids(where, ids)
        except ValueError as error:
            if not first:
                raise
            raise ValueError(f"{error} Ids count from {first}, this writer's first.") from None

    def separate(self) -> None:
        """Starts to count the steps of each environment separately."""
        if self.together:
            self.steps[:] = self.step
            self.together = False

    def rejoin(self) -> bool:
        """Uses one count again if all environments are at the same step; returns whether so."""
        if not self.together and (self.steps == self.steps[0]).all():
            self.together, self.step = True, int(self.steps[0])
        return self.together

    def interrupt(self, env_ids: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Breaks the streams of some environments; call it only while counts are separate.

        Items start at multiples of the period, so the counts increase to the next multiple.

        Returns:
          The counts before and after, [n].
        """
        before = self.steps[env_ids]
        after = -(-before // period) * period
        self.steps[env_ids] = self.unbroken[env_ids] = after
        self.last_gap = int(self.unbroken.max())
        return before, after

    def last_steps(self) -> np.ndarray:
        """Returns the last step of each environment, -1 for none, [num_envs]."""
        return np.full(len(self.envs), self.step - 1) if self.together else self.steps - 1

    def save(self) -> PyTree:
        """Returns the state as arrays."""
        return {"steps": self.last_steps() + 1, "unbroken": self.unbroken.copy()}

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        restore_into(self.steps, tree["steps"], "steps, one number for each environment,")
        restore_into(self.unbroken, tree["unbroken"], "unbroken, one for each environment,")
        self.last_gap, self.together = int(self.unbroken.max()), False
        self.rejoin()


def restore_into(array: np.ndarray, saved: np.ndarray, what: str) -> None:
    """Copies a saved array into one of the same shape.

    Raises:
      ValueError: the shapes differ; numpy would repeat a single row, or name no reason.
    """
    if np.shape(saved) != array.shape:
        raise ValueError(
            f"ReplayBuffer.load: {what} must have the shape {array.shape} that follows from this "
            f"config; got a saved {np.shape(saved)}. Load into an equal config."
        )
    array[...] = saved
