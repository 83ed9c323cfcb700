"""Watches other people's code that runs in the caller's thread and may never return.

The caller writes what it calls, which costs less than a clock would. One thread of the process
looks at that from time to time. If nothing changes for longer than allowed, it makes the call
raise: in the main thread by a signal, which also ends a sleep or a wait, in others at the next line
of Python. What returns to neither, such as a deadlock in C, is left to `at_last_resort`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlstack.checks import EnvCrash, place_of

_SIGNAL = signal.SIGURG  # which a process ignores that has no handler
_LONGEST_TICK = 1.0  # seconds between two looks
_GRACE = 5.0  # seconds for a call to notice that it must end

_log = logging.getLogger(__name__)


class Hangs(BaseException):
    """Raised inside a call that takes too long; ``except Exception`` does not catch it."""


class Limit(NamedTuple):
    """A time limit for calls."""

    seconds: float
    option: str  # the name of the option that sets the limit


class Watch:
    """Calls that a thread makes one after another, such as the steps of a pool's environments.

    ``with watch.calls(what, limit):`` surrounds them; before each of them the caller sets `at`.

    Attributes:
      at: the number of what is called.
      count: the number of calls so far; the caller increases it before each call.
    """

    def __init__(self, name: str, kind: str = "Env") -> None:
        """Creates a watch; `calls` starts watching.

        Args:
          name: the name of the called object, for messages.
          kind: the kind of object that `at` numbers; "" if there is only one object.
        """
        self.at = self.count = 0
        self._name, self._kind = name, kind
        self._what, self._limit, self._thread = "", Limit(0.0, ""), 0  # 0: no call is in progress
        self._seen, self._stuck = (0, 0, 0), 0.0
        self._hangs: str = ""  # the message, while the call is made to raise
        self._is_lost = False
        self._is_added = False

    def calls(self, what: str, limit: Limit) -> Watch:
        """Returns the watch, whose body's calls may each take as long as the limit.

        The body raises EnvCrash if one of them takes longer; the message says where it was.
        """
        self._what, self._limit = what, limit
        return self

    def __enter__(self) -> Watch:
        self.count += 1
        if not self._is_added:
            _add(self)
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: Any
    ) -> None:
        self._thread = 0
        if isinstance(error, Hangs):
            raise EnvCrash(str(error)) from None

    def look(self, elapsed: float) -> None:
        """Counts the seconds of the call in progress, and makes it raise after its limit."""
        now = (self._thread, self.count, self.at)
        if not self._thread or now != self._seen:
            self._seen, self._stuck, self._hangs, self._is_lost = now, 0.0, "", False
            return
        self._stuck += elapsed
        if self._stuck <= self._limit.seconds:
            return
        if not self._hangs:
            self._hangs = self._message()
        if self._stuck <= self._limit.seconds + _GRACE:
            self._interrupt()
        elif not self._is_lost:
            self._is_lost = True
            if _last_resort is not None:
                _last_resort(self._hangs)
            _log.error("%s It cannot be interrupted, and goes on.", self._hangs)

    def raise_if_hanging(self) -> None:
        """Raises `Hangs` in the calling thread if its call in progress takes too long."""
        now = (self._thread, self.count, self.at)
        if self._hangs and now == self._seen and self._thread == threading.get_ident():
            raise Hangs(self._hangs)

    def in_progress(self, thread: int) -> str:
        """Returns what a thread calls; "" if it calls nothing here."""
        if self._thread != thread:
            return ""
        return f"{self._where()}: {self._what}, which may take {self._allowed()}"

    @property
    def tick(self) -> float:
        """Seconds until the next look."""
        return min(_LONGEST_TICK, self._limit.seconds / 4) if self._thread else _LONGEST_TICK

    def _where(self) -> str:
        return f"{self._kind} {self.at} ({self._name})" if self._kind else self._name

    def _allowed(self) -> str:
        return f"{self._limit.option}={self._limit.seconds:g} s"

    def _message(self) -> str:
        advice = (
            "; use type='process' for environments that hang, because their workers restart."
            if self._kind
            else "."
        )
        return (
            f"{self._where()}: {self._what} must end within {self._allowed()}; it did not, and is "
            f"at {line_of(self._thread)}. Raise {self._limit.option} if it is slow{advice}"
        )

    def _interrupt(self) -> None:
        main = threading.main_thread().ident
        if self._thread == main and signal.getsignal(_SIGNAL) is _handle:
            signal.pthread_kill(main, _SIGNAL)
        elif self._stuck - self._limit.seconds <= _LONGEST_TICK:  # once; it stays pending
            text = self._hangs
            kind = type("Hangs", (Hangs,), {"__str__": lambda _: text})
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread), ctypes.py_object(kind)
            )


def line_of(thread: int, users: bool = False) -> str:
    """Returns "FILE:LINE: CODE" of the user's line in which a thread is, else of its deepest line.

    Args:
      thread: the thread's identifier.
      users: whether to return "" if no line is in the user's code.
    """
    frame = sys._current_frames().get(thread)
    return place_of(traceback.extract_stack(frame), users) if frame is not None else ""


def in_progress(thread: int) -> str:
    """Returns what a thread calls under a watch; "" if it calls nothing."""
    return next(filter(None, (watch.in_progress(thread) for watch in list(_watches))), "")


@contextlib.contextmanager
def at_last_resort(function: Callable[[str], object]) -> Iterator[None]:
    """While the body runs, calls a function if a call hangs and cannot be made to raise.

    Args:
      function: called with the message, in a separate thread.
    """
    global _last_resort
    before, _last_resort = _last_resort, function
    try:
        yield
    finally:
        _last_resort = before


_last_resort: Callable[[str], object] | None = None
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def _add(watch: Watch) -> None:
    """Starts looking at a watch."""
    global _thread
    with _lock:
        watch._is_added = True
        _watches.add(watch)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) in (
            signal.SIG_DFL,
            signal.SIG_IGN,
        ):
            signal.signal(_SIGNAL, _handle)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="rlstack-watch", daemon=True)
            _thread.start()


def _run() -> None:
    """Looks at all watches until none is left."""
    global _thread
    while True:
        began = time.monotonic()
        with _lock:
            tick = min((watch.tick for watch in _watches), default=0.0)
            if not tick:
                _thread = None
                return
        time.sleep(tick)
        # A process that was stopped and goes on has not worked in between.
        _look_at_all(min(time.monotonic() - began, 2 * tick))


def _look_at_all(elapsed: float) -> None:
    for watch in list(_watches):
        watch.look(elapsed)


def _forget_thread() -> None:
    """Resets this module in a forked child, which does not inherit the watching thread."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    for watch in list(_watches):
        watch._is_added = False


os.register_at_fork(after_in_child=_forget_thread)


def _handle(number: int, frame: types.FrameType | None) -> None:
    for watch in list(_watches):
        watch.raise_if_hanging()
