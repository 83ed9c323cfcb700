"""A limit on restarts: a rate, not a number for the whole lifetime."""

from __future__ import annotations

import collections


class RestartLimit:
    """Allows at most ``most`` restarts within ``window`` seconds of work.

    Only working time counts. Something that hangs, or that takes long to start, would otherwise
    never reach the limit.

    Attributes:
      total: number of restarts so far.
      text: the limit, for messages.
    """

    def __init__(self, most: int, window: float):
        self.total = 0
        self.text = f"at most {most} restarts within {window:g} s of work"
        self._most, self._window = most, window
        self._worked = 0.0
        self._times: collections.deque[float] = collections.deque()

    def count(self, worked: float) -> bool:
        """Counts a restart and returns whether the limit allows it.

        Args:
          worked: seconds of work since the previous restart.
        """
        self._worked += max(0.0, worked)
        while self._times and self._times[0] < self._worked - self._window:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(self._worked)
        self.total += 1
        return True
