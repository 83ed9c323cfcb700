"""Writes the steps of an actor to a replay whose learner may be lost and restarted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from rlstack.programs.program.base import CoordinatorClient
from rlstack.programs.program.replay_sides import ReplayWriter
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.rpc import UnavailableError
from rlstack.types import Transition


class RenewedWriter:
    """A `ReplayWriter` that outlives the learner.

    While the learner is lost, steps for which there is no space are discarded, so that the actor
    goes on for the other policies. Once the learner is back, a new writer begins new items: the
    memory of the old one may have ended with the learner, and discarded steps are missing between
    its items.

    Attributes:
      discarded: number of steps, of all environments.
    """

    def __init__(
        self, open_writer: Callable[[], ReplayWriter], learner: str, program: CoordinatorClient
    ) -> None:
        """Opens the first writer.

        Args:
          open_writer: opens a writer to the learner that is running now.
          learner: the learner's name.
          program: a client of the coordinator, which knows whether the learner is running.

        Raises:
          UnavailableError: the learner does not answer. Errors of ``open_writer`` are raised too.
        """
        self._open, self._name, self._program = open_writer, learner, program
        # Read before the writer is opened. A learner that is restarted in between has a higher
        # one, and the writer is then opened once more.
        self._incarnation = self._there() or 0
        self._writer: ReplayWriter | None = open_writer()
        self.discarded = 0

    @property
    def has_learner(self) -> bool:
        """Whether the learner is running, as far as this actor knows."""
        return self._writer is not None and self._there() is not None

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Stores one step of some environments, or discards it if the learner is lost."""
        self._renew()
        if self._writer is not None:
            try:
                self._writer.add(env_ids, transition, timeout=timeout)
                return
            except ReplayClosedError:  # the memory's owner has ended
                self._lose(back_from=self._incarnation + 1)
            except ReplayTimeoutError:
                if self._there() is not None:
                    raise
                self._lose(back_from=self._incarnation)
        self.discarded += len(transition.params_version)

    def flush(self) -> None:
        """Waits until everything added can be sampled."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Disconnects."""
        if self._writer is not None:
            self._writer.close()

    def _there(self) -> int | None:
        """Returns the incarnation of the learner if it is there."""
        return self._program.poll().learners.get(self._name)

    def _renew(self) -> None:
        """Opens a writer if the learner is back, or another one if it was restarted."""
        there = self._there()
        if there is None or there < self._incarnation:
            return
        if self._writer is not None:
            if there == self._incarnation:
                return
            self._lose(back_from=there)
        with contextlib.suppress(UnavailableError, ReplayClosedError):  # it is lost again
            self._writer = self._open()
            self._incarnation = there

    def _lose(self, *, back_from: int) -> None:
        """Discards steps until the learner has this incarnation or a later one."""
        assert self._writer is not None
        with contextlib.suppress(ReplayClosedError, ReplayTimeoutError, UnavailableError):
            self._writer.close()
        self._writer, self._incarnation = None, back_from
