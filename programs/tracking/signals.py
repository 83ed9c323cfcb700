"""SIGINT and SIGTERM as requests to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Interrupted(Exception):  # noqa: N818  (a request, not an error)
    """A signal asked the run to end. All progress is saved, unless the message says otherwise."""

    def __init__(self, signal_number: int, *, saved: bool = True) -> None:
        what = "everything is saved" if saved else "there was nothing to save yet"
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {what}.")
        self.exit_code = 128 + signal_number


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one has its usual effect.

    Only the main thread may set signal handlers; in other threads this does nothing.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, _Handler] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received = number
        for held, handler in self._previous.items():
            signal.signal(held, handler)
