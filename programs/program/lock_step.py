"""Lock-step: a barrier at which actors wait while the learner learns."""

from __future__ import annotations

import math
import threading
import time

ACT, WAIT, STOP = "act", "wait", "stop"


class LockStepBarrier:
    """A barrier of all actors and the learner, used in rounds.

    Actors may be killed and restarted, and may repeat a call whose answer was lost.
    """

    def __init__(
        self, num_actors: int, min_actors: int | None = None, grace_seconds: float = 0.0
    ) -> None:
        """Starts the first round.

        Args:
          num_actors: number of the program's actors.
          min_actors: number of actors that the learner waits for; None for all.
          grace_seconds: seconds that the learner then waits for the other actors. An actor that
            arrives later joins the next round at once.
        """
        self._num_actors, self._grace = num_actors, grace_seconds
        self._min_actors = min_actors or num_actors
        self._since: float | None = None  # time at which min_actors had arrived
        self._changed = threading.Condition()
        self._arrived: set[int] = set()  # ranks, in this round
        self._frames: dict[tuple[int, int], int] = {}  # (rank, incarnation) -> frames made
        self._round = 0
        self._go_on = True
        self._closed = False

    def arrive(
        self, rank: int, incarnation: int, env_frames: int, known_round: int, timeout: float
    ) -> tuple[str, int]:
        """Reports that an actor has made its steps; waits until the learner ends the round.

        Args:
          rank: the actor's rank.
          incarnation: number of restarts of the actor.
          env_frames: frames that this incarnation has made.
          known_round: the round that the actor's last call returned; -1 at its first call, which
            joins the current round.
          timeout: maximum time to wait, in seconds.

        Returns:
          What to do, and the round to pass to the next call. ACT: make the next steps. STOP: the
          program ends. WAIT: the round did not end in time; call again.
        """
        with self._changed:
            self._frames[rank, incarnation] = env_frames
            this = self._round if known_round < 0 else known_round
            if this == self._round:
                self._arrived.add(rank)
                self._changed.notify_all()
            ended = self._changed.wait_for(lambda: self._closed or self._round > this, timeout)
            if not ended:
                return WAIT, this
            return ACT if self._go_on and not self._closed else STOP, self._round

    def wait_for_actors(self, timeout: float) -> int | None:
        """Waits, for the learner; returns all actors' frames, or None if some are missing.

        With ``min_actors``, nobody is missing once that many have arrived and the others have had
        the grace period.
        """
        with self._changed:
            until = time.monotonic() + timeout
            while (wait := self._seconds_to_wait()) > 0:
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(wait, left))
            return sum(self._frames.values())

    def _seconds_to_wait(self) -> float:
        """Returns the seconds until nobody is missing, if no other actor arrives."""
        if len(self._arrived) == self._num_actors:
            return 0.0
        if len(self._arrived) < self._min_actors:
            return math.inf
        if self._since is None:
            self._since = time.monotonic()
        return self._since + self._grace - time.monotonic()

    def release(self, *, go_on: bool) -> None:
        """Ends the round: all actors act again if `go_on`, else they stop."""
        with self._changed:
            self._arrived.clear()
            self._since = None
            self._go_on = go_on
            self._round += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Releases all waiting actors, which stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
