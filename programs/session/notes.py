"""Lines that a program's display shows, such as the restart of an environment's worker."""

from __future__ import annotations

import collections
import logging
import threading

_MAX_NOTES = 20  # lines that a display may not have shown yet

_log = logging.getLogger(__name__)


class Notes:
    """The newest lines, numbered from 1; the oldest are forgotten. Any thread may add one."""

    def __init__(self, *, logged: bool = False) -> None:
        """Starts without lines.

        Args:
          logged: True to write the lines to the output of this process as well.
        """
        self._logged = logged
        self._lock = threading.Lock()
        self._lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=_MAX_NOTES)

    def add(self, text: str) -> None:
        """Adds a line."""
        if self._logged:
            _log.warning("%s", text)
        with self._lock:
            number = self._lines[-1][0] + 1 if self._lines else 1
            self._lines.append((number, text))

    def listed(self) -> list[list[int | str]]:
        """Returns the number and the text of each line."""
        with self._lock:
            return [[number, text] for number, text in self._lines]
