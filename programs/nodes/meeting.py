"""Lock-step: where actors wait while the learner learns."""

from __future__ import annotations

import threading

ACT, ATTEND, STOP = "act", "attend", "stop"


class Meeting:
    """A barrier of all actors and the learner, round after round.

    Actors may be killed and come back, and may call again when a call was lost.
    """

    def __init__(self, num_actors: int) -> None:
        self._num_actors = num_actors
        self._changed = threading.Condition()
        self._present: set[int] = set()
        self._frames: dict[tuple[int, int], int] = {}  # of each incarnation of each actor
        self._ended = 0  # rounds
        self._go_on = True
        self._closed = False

    def attend(
        self, rank: int, incarnation: int, env_frames: int, attended: int, timeout: float
    ) -> tuple[str, int]:
        """An actor's side: waits for the end of a round.

        Args:
          rank: of the actor.
          incarnation: of the actor.
          env_frames: that this incarnation made.
          attended: the number that the last call returned; -1 at first: this round, whichever it
            is.
          timeout: in seconds.

        Returns:
          What to do, and the number to say at the next call: ACT, STOP, or ATTEND again, because
          the round did not end in time.
        """
        with self._changed:
            self._frames[rank, incarnation] = env_frames
            this = self._ended if attended < 0 else attended
            if this == self._ended:
                self._present.add(rank)
                self._changed.notify_all()
            over = self._changed.wait_for(lambda: self._closed or self._ended > this, timeout)
            if not over:
                return ATTEND, this
            return ACT if self._go_on and not self._closed else STOP, self._ended

    def wait(self, timeout: float) -> int | None:
        """The learner's side: returns all actors' frames once all are here, else None."""
        with self._changed:
            here = self._changed.wait_for(lambda: len(self._present) == self._num_actors, timeout)
            return sum(self._frames.values()) if here else None

    def dismiss(self, *, go_on: bool) -> None:
        """Ends the round."""
        with self._changed:
            self._present.clear()
            self._go_on = go_on
            self._ended += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Sends everybody home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
