"""Counts the frames of a program's nodes: `FrameRates` measures, and `FrameBudget` grants them.

`FrameRates` has how many frames per second the nodes make, all measured over the same seconds.

`FrameBudget` divides the frames that are left among actors, so that a run does not exceed its
frames by much. Actors report a few times a second, and fast ones make thousands of frames in
between. So an actor may make only the frames that it was granted before it reports again. A grant
is at most half of what is left, so grants shrink towards the end, down to one unroll. Far from the
end a grant is twice what the actor made since its last report, so actors report no more often than
without grants. The time that a grant takes does not depend on the number of actors.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import NamedTuple

_WINDOW = 15.0  # seconds over which rates are measured
_SPACING = 1.0  # seconds between two moments that are kept
_SILENT = 2.0  # seconds after which a grant is not waited for; a live actor has reported by then


class FrameRates:
    """Frames per second of each node.

    All rates are measured between the same two moments, from frames as they were counted until
    then. So they add up to the rate of the program, whenever its nodes report. The frames of a node
    are those of all its incarnations. The time before the first frames, in which nodes start and
    compile, does not count.
    """

    def __init__(self) -> None:
        """Starts with no frames."""
        self._frames: dict[str, float] = {}
        self._total = 0.0
        self._moments: deque[tuple[float, Mapping[str, float]]] = deque()  # oldest first

    def count(self, node: str, frames: float, now: float) -> None:
        """Adds frames that a node has made.

        Args:
          node: name of the node.
          frames: number of frames since the node's last report.
          now: the time in seconds.
        """
        self._frames[node] = self._frames.get(node, 0.0) + frames
        self._total += frames
        if not self._moments or not self._total:
            self._moments = deque([(now, dict(self._frames) if self._total else {})])
        elif now >= self._moments[-1][0] + _SPACING:
            self._moments.append((now, dict(self._frames)))
            self._forget(now)

    def of(self, node: str, now: float) -> float:
        """Returns the rate of a node over the last seconds; 0 without reports."""
        if not self._moments:
            return 0.0
        self._forget(now)
        then, before = self._moments[0]
        made = self._frames.get(node, 0.0) - before.get(node, 0.0)
        return made / (now - then) if now > then else 0.0

    def _forget(self, now: float) -> None:
        while len(self._moments) > 1 and self._moments[1][0] <= now - _WINDOW:
            self._moments.popleft()


class _Grant(NamedTuple):
    size: int  # frames that the actor may make until its next report
    when: float


class FrameBudget:
    """Grants frames to the actors of one program.

    At the end each actor has made at most one unroll more than the budget allows.
    """

    def __init__(self, frames: int, unroll: int, ahead: int = 2) -> None:
        """Starts without grants.

        Args:
          frames: the budget of the program.
          unroll: frames of one unroll of all environments of an actor, the smallest grant.
          ahead: periods of reports for which a grant far from the end lasts; more if reports and
            answers are delayed.
        """
        self._frames, self._unroll, self._ahead = frames, unroll, ahead
        self._made: dict[str, int] = {}  # frames of each actor at its last report
        # Those that are waited for, the oldest first, the sum of their sizes, and how many of them
        # are larger than an unroll.
        self._grants: OrderedDict[str, _Grant] = OrderedDict()
        self._granted = self._large = 0

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
        last = self._made.get(actor, 0)
        since = made - last if made >= last else made
        self._forget(actor)
        while self._grants and next(iter(self._grants.values())).when <= now - _SILENT:
            self._forget(next(iter(self._grants)))
        free = self._frames - total - self._granted
        size = self._unroll
        if free > 0:
            size = max(size, min(self._ahead * since, free // 2))
        elif self._large:
            size = 0
        self._made[actor] = made
        self._grants[actor] = _Grant(size, now)
        self._granted += size
        self._large += size > self._unroll
        return made + size

    def _forget(self, actor: str) -> None:
        grant = self._grants.pop(actor, None)
        if grant is not None:
            self._granted -= grant.size
            self._large -= grant.size > self._unroll
