"""The gate of an actor in rounds: it acts until it has reported, then waits for newer params."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.rounds import Reports
from rlstack.rpc import StoppedError
from rlstack.types import Transition


class RoundGate:
    """Stops an actor that has reported until it can act with newer params.

    What it would add before that belongs to no round. The learner does not wait for an actor that
    is late, so newer params are there when such an actor reports, and it continues at once.

    Attributes:
      waited: seconds waited.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        has_newer: Callable[[int, float], bool],
        should_stop: Callable[[], bool],
        period: float,
    ) -> None:
        """Starts without steps.

        Args:
          cfg: the rules of the replay.
          num_envs: environments of this actor.
          has_newer: waits until the actor's next step would use params newer than a version, or for
            some seconds; returns whether it would.
          should_stop: returns True to end the wait.
          period: seconds between two calls of it.
        """
        self._reports = Reports(cfg, num_envs)
        self._has_newer, self._should_stop, self._period = has_newer, should_stop, period
        self._passed = -1  # newer params than of this version were there
        self.waited = 0.0

    def added(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        """Waits if this step has completed a report.

        Args:
          env_ids: [n] ints, counted from 0 in this actor; None for all in order.
          transition: the step that has been added to the replay.

        Raises:
          StoppedError: ``should_stop`` returned True.
        """
        self._reports.add(env_ids, transition)
        version = self._reports.version
        if version <= self._passed:
            return
        started = time.monotonic()
        while not self._has_newer(version, self._period):
            if self._should_stop():
                raise StoppedError
        self._passed = version
        self.waited += time.monotonic() - started
