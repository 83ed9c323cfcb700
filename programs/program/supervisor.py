"""Runs a node's process again until it succeeds: keeps restartable nodes alive.

Each node has a supervisor, a process that calls `supervise`. The node itself is its child. A failed
actor, evaluator or inference service is restarted, and every node's failure is recorded. Launchpad
alone would end the whole program, and would not say how the node ended. This is plain Python
without the stack's packages; all times are passed in.

The child finds its incarnation (0, 1, ...) in the environment variable RLSTACK_INCARNATION, and
says with `tell` how it ends. An end that the child does not call ordered is a failure, also with
exit code 0. Every failure is added to RECORD as one line of JSON. A child that gives no sign of
life (`rlstack.programs.program.launch.signs`) for SILENCE seconds is killed, and has failed.

SIGTERM and SIGINT are passed on to the child, which is then not restarted and is killed after GRACE
seconds; this process then ends with the exit code `SIGNALLED`. If the parent has not sent the
signal, the whole program ends. The reason is then recorded and the parent is told (`ENDING`) at
once, so that the other nodes end while the child saves. If this process is killed, the child is
killed too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

INCARNATION = "RLSTACK_INCARNATION"
SIGNALLED = 113  # the exit code of a supervisor that was told to end
ENDING = signal.SIGUSR1  # tells the receiver that the sender ends because of a signal
PARENT = "RLSTACK_PARENT"  # the process id of the parent, as the parent itself sets it
# The descriptor of a file in memory, which receives the child's `End` and its signs of life.
END = "RLSTACK_END"

_TICK_SECONDS = 1.0  # between two checks for signs of life
_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)
_SIGNALS = (*_TOLD_TO_END, signal.SIGCHLD, ENDING)
_PR_SET_PDEATHSIG = 1
_LONGEST_TEXT = 12_000  # characters of a traceback in the record
_SIGNALLED = "it was told to end by a signal (SIGTERM or SIGINT) that the program did not send"
_OWN_SIGNAL = "its supervisor got a signal (SIGTERM or SIGINT) that the program did not send"


class End(NamedTuple):
    """How a node ended."""

    ordered: bool = False  # whether the coordinator or the learner told the node to end
    reason: str = ""  # why it failed; empty if it did not
    traceback: str = ""
    node: str = ""  # the node to blame; empty for this one
    secondary: bool = False  # whether the failure of another node may be the cause
    passing: bool = False  # whether a retry may succeed, for example after a host was away
    ran_seconds: float = 0.0  # duration of the node's work, without its start
    kind: str = ""  # for errors that count as the same error whatever the reason; else empty


STOPPED = End(reason=_SIGNALLED, passing=True)  # the end of a process that received a signal


def tell(end: End) -> None:
    """Tells the supervisor of this process how it ends; without a supervisor, does nothing."""
    handle = os.environ.get(END)
    if handle is not None:
        with contextlib.suppress(OSError):
            os.pwrite(int(handle), json.dumps(end).encode(), 0)


class Child(Protocol):
    """The process of a node; a part of the interface of ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal that killed it; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""

    def kill(self) -> None:
        """Sends SIGKILL, if it still runs."""


# Starts a child, which inherits a descriptor, has some more environment variables, and first calls
# a function.
Start = Callable[[int, Mapping[str, str], Callable[[], None]], Child]


class RestartPolicy:
    """Decides whether something that failed is restarted, and after which pause.

    Attributes:
      failures: number of failures so far.
      allows_any: False if restarts are disabled.
    """

    def __init__(
        self,
        max_restarts: int,
        first_pause: float,
        longest_pause: float,
        forgotten_after: float,
        at_once: float,
    ) -> None:
        """Starts without failures.

        Args:
          max_restarts: maximum number of restarts in a row; the next failure is final.
          first_pause: seconds before the first restart; the pause doubles each time.
          longest_pause: maximum pause in seconds.
          forgotten_after: seconds of running after which earlier failures no longer count.
          at_once: an error that recurs within these seconds of work is taken to be permanent.
        """
        self.failures = 0
        self.allows_any = max_restarts > 0
        self._in_a_row = 0
        self._last_reason = ""
        self._max_restarts = max_restarts
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._forgotten_after, self._at_once = forgotten_after, at_once

    def failed(self, lived_seconds: float, end: End = End()) -> float | None:  # noqa: B008
        """Returns the seconds to wait before the restart, or None if there is none.

        There is none after too many failures, and none if the error of the failure before came
        back at once: it would come back again.
        """
        self.failures += 1
        self._in_a_row = 1 if lived_seconds >= self._forgotten_after else self._in_a_row + 1
        # Addresses of objects differ.
        reason = end.kind or re.sub(r"0x[0-9a-f]+", "0x", end.reason)
        came_back = bool(reason) and reason == self._last_reason
        self._last_reason = reason
        if self._in_a_row > self._max_restarts:
            return None
        if came_back and not end.passing and end.ran_seconds < self._at_once:
            return None
        return min(self._first_pause * 2 ** (self._in_a_row - 1), self._longest_pause)


def parent_id() -> int:
    """Returns the process id of the parent that started this process, also if it is gone."""
    return int(os.environ.pop(PARENT, "") or os.getppid())


def die_with_parent(signal_number: int, parent: int) -> None:
    """Asks the kernel (Linux only) to signal this process when its parent ends.

    Args:
      signal_number: number of the signal.
      parent: process id of the parent. If the parent has already ended, the signal is sent at once.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def record_failure(path: str, *, node: str, end: End, **fields: object) -> None:
    """Adds one line to the record of failures; lines of several processes do not mix.

    This function never raises, so that its caller can go on. A failure that cannot be recorded is
    printed to standard error.

    Args:
      path: path of the record.
      node: the name of the node that failed.
      end: the description of the failure.
      **fields: more fields of the line.
    """
    line = {"time": time.time(), "node": end.node or node, "reason": end.reason, **fields}
    line["secondary"] = end.secondary
    if end.node:
        line["reported_by"] = node
    text = end.traceback
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    try:
        # A line with its traceback may not fit a full disk; the reason alone may.
        if not (_append(path, {**line, "traceback": text}) or _append(path, line)):
            raise OSError("the disk is full")
    except OSError as error:
        say(f"{node}: {end.reason} (not recorded in {path}: {error})")


def _append(path: str, fields: dict[str, object]) -> bool:
    """Writes one line; returns whether it could be written whole."""
    data = json.dumps(fields).encode() + b"\n"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _lock(handle)  # while another process writes, its line looks torn
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data  # the line before is torn
        return os.write(handle, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    """Waits for other writers, for 1 s at most: one of them may be suspended."""
    for _ in range(100):
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:  # the file system has no locks
            return None
    return None


def say(text: str) -> None:
    """Prints a line on standard error, which may be a file on a full disk."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace") + b"\n")


def describe(exit_code: int) -> str:
    """Returns a process's exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-exit_code}"


class _Supervisor:
    """Runs one node's process, and restarts it after failures."""

    def __init__(
        self, record: str, name: str, grace: float, silence: float, restarts: RestartPolicy
    ) -> None:
        """Blocks signals. The supervisor waits for signals instead, which tells who sent them.

        Args:
          record: the file of failures.
          name: the name of the node.
          grace: seconds from a signal until the child is killed.
          silence: seconds without a sign of life until the child is killed; 0 for never.
          restarts: decides whether a failed child is restarted.
        """
        self._record, self._name, self._restarts = record, name, restarts
        self._grace, self._silence = grace, silence
        self._parent = parent_id()
        die_with_parent(signal.SIGTERM, self._parent)
        self._unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._ending = False  # whether no child is started any more
        self._kill_at = math.inf  # when the child's grace ends
        self._passed_on: set[int] = set()  # signals, to the present child

    def run(self, start: Start) -> int:
        """Runs children until one ends as ordered or fails for good, or a signal comes."""
        while True:
            started = time.monotonic()
            code, end = self._run(start)
            if end.ordered:
                return 0
            if self._ending:
                if end.traceback and not (end.secondary or end.passing):  # why it ends, maybe
                    self._add(end, restarts=False, ending=True)
                return SIGNALLED
            incarnation = self._restarts.failures
            pause = self._restarts.failed(time.monotonic() - started, end)
            again = pause is not None
            self._add(end, incarnation=incarnation, restarts=again, pause=pause)
            if pause is None:
                say(f"{self._name}: {end.reason}, after {incarnation} restarts")
                return code if code > 0 else 128 - code if code < 0 else 1
            say(f"{self._name}: {end.reason}; restarts in {pause:g} s")
            until = time.monotonic() + pause
            while not self._ending and (left := until - time.monotonic()) > 0:
                self._receive(signal.sigtimedwait(_SIGNALS, left), None)
            if self._ending:
                return SIGNALLED

    def _add(self, end: End, **fields: Any) -> None:
        fields = {"incarnation": self._restarts.failures, **fields}
        record_failure(self._record, node=self._name, end=end, **fields)

    def _run(self, start: Start) -> tuple[int, End]:
        """Runs one child; returns its exit code and how it ended."""
        parent, told = os.getpid(), os.memfd_create("end", 0)

        def prepare() -> None:
            die_with_parent(signal.SIGKILL, parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._unblocked)

        try:
            variables = {INCARNATION: str(self._restarts.failures), END: str(told)}
            child = start(told, variables, prepare)
            was_silent, code = self._wait(child, told), child.poll() or 0
            text = os.pread(told, os.fstat(told).st_size, 0)
        except OSError as error:
            return 1, End(reason=f"it could not be started: {error}", passing=True)
        finally:
            os.close(told)
        with contextlib.suppress(ValueError, TypeError):
            end = End(*json.loads(text))
            if end.ordered or end.reason:
                return code, end
        if was_silent:
            ended = f"it gave no sign of life for {self._silence:g} s: it hung, or was stopped"
        else:
            ended = describe(code) if code else "it ended with exit code 0 before the program did"
        return code, End(reason=ended, passing=True)

    def _wait(self, child: Child, told: int) -> bool:
        """Waits for the child's end; returns whether it was killed because it was silent.

        Args:
          child: the process.
          told: the file whose time its signs of life change.
        """
        self._kill_at, self._passed_on = math.inf, set()
        last_sign, silent = 0, 0.0
        while child.poll() is None:
            began = time.monotonic()
            if began >= self._kill_at or (self._silence and silent > self._silence):
                child.kill()
            tick = min(_TICK_SECONDS, max(0.01, self._kill_at - began))
            self._receive(signal.sigtimedwait(_SIGNALS, tick), child)
            sign = os.fstat(told).st_mtime_ns
            # A wait that was longer shows that this process was stopped itself.
            passed = min(time.monotonic() - began, _TICK_SECONDS)
            silent = silent + passed if sign == last_sign else 0.0
            last_sign = sign
        return bool(self._silence) and silent > self._silence

    def _receive(self, found: signal.struct_siginfo | None, child: Child | None) -> None:
        """Acts on a signal, if there is one."""
        if found is None:
            return
        if found.si_signo == ENDING and child and found.si_pid == child.pid:
            if self._kill_at == math.inf:  # else the child got it from here
                self._kill_at = time.monotonic() + self._grace
                if not self._restarts.allows_any:
                    self._end_program(STOPPED)
        elif found.si_signo in _TOLD_TO_END:
            self._kill_at = min(self._kill_at, time.monotonic() + self._grace)
            if child and found.si_signo not in self._passed_on:
                # Only once, because Launchpad's handlers count how often a signal comes.
                self._passed_on.add(found.si_signo)
                child.send_signal(found.si_signo)
            # When a parent ends, the kernel sends SIGTERM.
            if found.si_pid != self._parent and os.getppid() == self._parent:
                self._end_program(End(reason=_OWN_SIGNAL, passing=True))
            self._ending = True

    def _end_program(self, end: End) -> None:
        """Ends the program, unless it ends already."""
        if not self._ending:
            self._ending = True
            self._add(end, restarts=False)
            with contextlib.suppress(OSError):
                os.kill(self._parent, ENDING)


def supervise(
    record: str, name: str, grace: float, silence: float, restarts: RestartPolicy, start: Start
) -> int:
    """Supervises a node in this process, which does nothing else; returns its exit code.

    Args:
      record: the file of failures.
      name: the name of the node.
      grace: seconds from a signal until the child is killed.
      silence: seconds without a sign of life until the child is killed; 0 for never.
      restarts: decides whether a failed child is restarted.
      start: starts a child.
    """
    with contextlib.suppress(ImportError):  # it also runs without the site's packages
        from setproctitle import setproctitle

        setproctitle(f"rlstack: supervisor:{name} {os.path.dirname(record)}")
    try:
        return _Supervisor(record, name, grace, silence, restarts).run(start)
    except Exception as error:
        text = traceback.format_exc()
        end = End(reason=f"its supervisor failed: {type(error).__name__}: {error}", traceback=text)
        record_failure(record, node=name, end=end, incarnation=restarts.failures, restarts=False)
        say(text)
        return 1
