"""SIGINT and SIGTERM as requests to stop.

`StopSignals` turns signals into requests. The command `rlstack` also calls `watch`, before it
imports anything else: then a thread acts on signals, also outside of `StopSignals`. The reason is
that Python runs a handler only when the main thread returns from C, where XLA compiles for minutes,
and that a handler that raises an exception raises it anywhere, for example in an import.

Both give the main thread a stack for handlers, see `give_handlers_a_stack`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_NOTHING, _EVERYTHING = "there was nothing to save yet", "everything is saved"
# Seconds for the main thread to notice a request. It notices at once, except in a long call of C.
_NOTICE = 2.0
# Seconds after which a program that has not ended says why. Most end, or are killed, before.
_EXPLAINED = 4.0
_WAKE = b"\0"  # is no signal
_CLEAN_UP = 2.0  # seconds for all functions of `at_sudden_end`


class Interrupted(Exception):  # noqa: N818  (a request, not an error)
    """A signal asked the run to end. All progress is saved, unless the message says otherwise."""

    def __init__(self, signal_number: int, *, saved: bool = True) -> None:
        what = _EVERYTHING if saved else _NOTHING
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {what}.")
        self.exit_code = 128 + signal_number


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second one has its usual effect.

    In the command `rlstack`, a second one ends the process at once, with one line. Only the main
    thread may set signal handlers; in other threads this does nothing.
    """

    def __init__(
        self,
        tell: Callable[[str], object] | None = None,
        *,
        has_progress: Callable[[], bool] = lambda: True,
        sets_handlers: bool = True,
    ) -> None:
        """Creates the context manager; signals are handled once it is entered.

        Args:
          tell: receives a line for the user if a command of `rlstack` has not ended 4 s after the
            request; called at most once, from a thread.
          has_progress: returns True if there is something to save. If there is nothing, and the
            main thread does not notice the request within 2 s because it compiles, the command ends
            at once.
          sets_handlers: False if the handlers of another library make the program stop.
        """
        self.has_progress = has_progress
        self._tell = tell
        self._sets_handlers = sets_handlers
        self._received: int | None = None
        self._is_noticed = False
        self._previous: dict[int, _Handler] = {}

    @property
    def received(self) -> int | None:
        """The number of the signal that asked to stop; None if none has come."""
        if self._received is not None:
            self._is_noticed = True
        return self._received

    @received.setter
    def received(self, number: int) -> None:
        self._received = number

    def is_ignored(self) -> bool:
        """Whether a signal was received that the program has not noticed, with nothing to save."""
        return self._received is not None and not self._is_noticed and not self.has_progress()

    def explain(self) -> None:
        """Tells the user, once, what the program does after it has received a signal."""
        tell, self._tell = self._tell, None
        if tell is not None and self._received is not None:
            name = signal.Signals(self._received).name
            tell(
                f"{name} was received: {_awaited()}, then everything is saved. A second signal "
                "ends the command at once."
            )

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        give_handlers_a_stack()
        if _watch is not None:
            _watch.pass_to(self)
        elif self._sets_handlers:
            for number in _NUMBERS:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _watch is not None:
            _watch.take_back(self, f"; {_EVERYTHING}" if kind is None else "")
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self._received = number
        for held, handler in self._previous.items():
            signal.signal(held, handler)


def watch(command: str) -> None:
    """Starts a thread that acts on SIGINT and SIGTERM until this process ends.

    Outside of `StopSignals`, a signal ends the process at once: with one line on standard error,
    without a traceback, and with exit code 128 plus the signal's number.

    Args:
      command: the command's name, which the line on standard error mentions.
    """
    global _watch
    give_handlers_a_stack()
    _watch = _Watch(command)


def give_handlers_a_stack() -> None:
    """Makes handlers of signals run on a stack of their own in this thread, the main thread.

    XLA multiplies matrices with oneDNN. While some of its kernels run, the stack pointer points
    into the heap (https://github.com/uxlfoundation/oneDNN/issues/4845). A signal that comes then
    has its frame written there, over other data: a later update is wrong, or the process dies in
    malloc. All handlers of Python ask for the thread's alternate stack, and ``faulthandler``
    allocates one. It also prints a traceback if the process crashes.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)


def is_watching() -> bool:
    """Whether this process belongs to a command of `rlstack`, which has called `watch`."""
    return _watch is not None


def fail(text: str) -> None:
    """Ends the process at once because of an error, and prints it as the command would."""
    end(f"rlstack {_watch.command}: {text}" if _watch is not None else text, 1)


def at_sudden_end(function: Callable[[], object]) -> Callable[[], None]:
    """Registers a function that cleans up when a signal ends this process at once.

    It runs in another thread, for at most 2 s, and the main thread runs on. Returns a function that
    removes it.
    """
    _cleaners.append(function)
    return lambda: _cleaners.remove(function)


def _awaited() -> str:
    """Returns what the main thread must end before it can notice a signal."""
    from rlstack.envs import watch  # now, because signals have handlers before all other imports

    main = threading.main_thread().ident or 0
    if called := watch.in_progress(main):
        return f"{called}, ends (it is at {watch.line_of(main)})"
    if line := watch.line_of(main, users=True):
        return f"what is called at {line} returns"
    return "the update in progress ends"


def end(line: str, code: int) -> None:
    """Ends the process at once, although its main thread may be in C.

    Args:
      line: the text to write to standard error.
      code: the exit code.
    """
    # Other threads run on, and may fail where the clean-up takes away their files.
    threading.excepthook = lambda _: None
    cleaning = threading.Thread(target=_clean_up, daemon=True)
    cleaning.start()
    cleaning.join(_CLEAN_UP)
    if _watch is not None:
        _watch.restore_terminal()
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())  # another thread may hold the lock of sys.stderr
    os._exit(code)


class _Watch:
    """Acts on signals: in the main thread where Python runs handlers, else in a thread."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._note = f"; {_NOTHING}"
        self._lock = threading.RLock()  # a handler may interrupt its holder
        self._stop: StopSignals | None = None
        self.restore_terminal = _saved_terminal()
        self._pipe, self._writer = os.pipe()
        os.set_blocking(self._pipe, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _NUMBERS:
            signal.signal(number, lambda *_: self._read())
        os.register_at_fork(after_in_child=_stop_watching)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def pass_to(self, stop: StopSignals) -> None:
        """Makes the next signal a request."""
        with self._lock:
            self._stop = stop

    def take_back(self, stop: StopSignals, note: str) -> None:
        """Makes the next signal end the process, with this note."""
        with self._lock:
            if self._stop is stop:
                self._stop, self._note = None, note

    def _run(self) -> None:
        waits: list[tuple[float, Callable[[], None]]] = []  # what to do if no signal comes
        while True:
            if select.select([self._pipe], [], [], waits[0][0] if waits else None)[0]:
                self._read()
                waits = [(_NOTICE, self._end_if_ignored), (_EXPLAINED - _NOTICE, self._explain)]
            else:
                _, act = waits.pop(0)
                act()

    def _end_if_ignored(self) -> None:
        with self._lock:
            stop = self._stop
            if stop is not None and stop.is_ignored():
                self._end(stop.received or signal.SIGINT, f"; {_NOTHING}")

    def _explain(self) -> None:
        stop = self._stop  # without the lock: a second signal must not wait for the output
        if stop is not None:
            stop.explain()

    def _read(self) -> None:
        """Acts on received signals that the watcher thread has not read yet."""
        with self._lock, contextlib.suppress(BlockingIOError):
            for number in os.read(self._pipe, 64):
                if number in _NUMBERS:
                    self._act(number)

    def _act(self, number: int) -> None:
        """Passes a request on, or ends the process."""
        if self._stop is None:
            self._end(number, self._note)
        elif self._stop.received is None:
            self._stop.received = number
            # Wake the watcher thread too: it must start the escalation timer even if the Python
            # handler ran first.
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, _WAKE)
        else:
            self._end(number, ", the second signal; progress since the last save is lost")

    def _end(self, number: int, note: str) -> None:
        """Ends the process. Its main thread may be in C, so nothing can be raised there."""
        name = signal.Signals(number).name
        end(f"rlstack {self.command}: stopped by {name}{note}.", 128 + number)


_watch: _Watch | None = None
_cleaners: list[Callable[[], object]] = []


def _clean_up() -> None:
    for function in reversed(_cleaners):
        with contextlib.suppress(Exception):
            function()


def _stop_watching() -> None:
    """Restores default signal handling in a forked child, detaching it from its parent's pipe."""
    global _watch
    _watch = None
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _saved_terminal() -> Callable[[], None]:
    """Returns a function that gives the terminal its present settings, and shows the cursor."""
    if not (sys.stdin and sys.stdin.isatty()):
        return lambda: None
    import termios

    settings = termios.tcgetattr(0)

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, settings)
        if os.isatty(2):
            with contextlib.suppress(OSError):
                os.write(2, b"\x1b[?25h\n")

    return restore
