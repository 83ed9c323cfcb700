"""Divides the frames that are left among actors, so that a run does not exceed its frames by much.

Actors report a few times a second, and fast ones make thousands of frames in between. So an actor
may make only the frames that it was granted before it reports again. A grant is at most half of
what is left, so grants shrink towards the end, down to one unroll. Far from the end a grant is
twice what the actor made since its last report, so actors report no more often than without grants.
"""

from __future__ import annotations

from typing import NamedTuple

_SILENT = 2.0  # seconds after which a grant is not waited for; a live actor has reported by then


class _Grant(NamedTuple):
    made: int  # frames of the actor at its last report
    until: int  # frames that it may have made at its next report
    when: float


class FrameBudget:
    """The grants of one program. At its end each actor is at most one unroll over the budget."""

    def __init__(self, frames: int, unroll: int) -> None:
        """Starts without grants.

        Args:
          frames: the budget of the program.
          unroll: frames of one unroll of all environments of an actor, the smallest grant.
        """
        self._frames, self._unroll = frames, unroll
        self._grants: dict[str, _Grant] = {}

    def grant(self, actor: str, made: int, total: int, now: float) -> int:
        """Returns the frames that an actor may have made when it reports again.

        It equals ``made`` if the actor must wait, because others may still use up the budget. They
        report soon, and then get smaller grants.

        Args:
          actor: name of the actor.
          made: frames that the actor has made since its process last started.
          total: frames that the program has made.
          now: the time of a monotonic clock, in seconds.
        """
        last = self._grants.get(actor)
        since = made - last.made if last is not None and made >= last.made else made
        others = [
            grant.until - grant.made
            for name, grant in self._grants.items()
            if name != actor and now - grant.when < _SILENT
        ]
        free = self._frames - total - sum(others)
        size = self._unroll
        if free > 0:
            size = max(size, min(2 * since, free // 2))
        elif max(others, default=0) > self._unroll:
            size = 0
        self._grants[actor] = _Grant(made, made + size, now)
        return made + size
