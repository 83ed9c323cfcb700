"""Waiting for what another process does."""

from __future__ import annotations

import time

_SHORTEST, _LONGEST = 50e-6, 2e-3  # seconds slept between two looks


class Backoff:
    """Waits by short sleeps that grow, until a deadline."""

    def __init__(self, timeout: float):
        self._start = time.monotonic()
        self._deadline = self._start + timeout
        self._pause = _SHORTEST

    def sleep(self) -> bool:
        """Sleeps, unless the time is over; says whether it was not."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(self._pause, left))
        self._pause = min(self._pause * 1.5, _LONGEST)
        return True

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._start
