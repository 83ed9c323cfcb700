"""How many frames per second the nodes of a program make, all measured over the same seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_WINDOW = 15.0  # seconds over which rates are measured
_SPACING = 1.0  # seconds between two moments that are kept


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
