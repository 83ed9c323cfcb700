"""Calls that may block for ever, and what the two halves of a buffer tell each other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from rlstack.replay.base import ReplayTimeoutError


class Calls:
    """Makes calls one after the other in a thread of its own.

    Some of Reverb's calls never return while the server is away, and cannot be cut short. The
    thread is left behind then; it ends with the process, or when the server is back.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reverb-calls", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Makes the call after those submitted before."""
        future: Future = Future()
        self._queue.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            future, function, arguments = job
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
            del job, future, function, arguments  # they may hold a buffer

    def close(self) -> None:
        """Ends the thread, unless it is stuck."""
        self._queue.put(None)
        self._thread.join(timeout=0.5)


def result_of(call: Future, where: str, address: str, timeout: float) -> Any:
    """Returns a call's result.

    Raises:
      ReplayTimeoutError: it did not come in time.
    """
    try:
        return call.result(timeout)
    except FutureTimeoutError:
        raise ReplayTimeoutError(
            f"{where}: the Reverb server at {address} must answer; it did not within "
            f"{timeout:g} s. Is it running?"
        ) from None


class Shared:
    """What both halves of a buffer know: numbers that only grow."""

    def __init__(self) -> None:
        self.version = -1  # newest params version told or seen
        self.largest_priority = 1.0

    def saw_version(self, version: int) -> None:
        """Takes note of a params version."""
        self.version = max(self.version, version)

    def saw_priority(self, priority: float) -> None:
        """Takes note of a priority."""
        self.largest_priority = max(self.largest_priority, priority)
