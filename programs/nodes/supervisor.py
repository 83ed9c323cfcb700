"""Runs a command again until it succeeds: keeps restartable nodes alive.

    python supervisor.py RECORD NAME MAX_RESTARTS GRACE FIRST_PAUSE LONGEST_PAUSE FORGOTTEN_AFTER \
        AT_ONCE COMMAND...

Launchpad ends a whole program when one of its processes fails, and does not say how it ended. So
Launchpad's process is this script, and the node itself is its child. A failed actor, evaluator or
inference service is restarted, and every node's failure is recorded. This is plain Python without
the stack's packages, because there is one such process for each node; all times are passed in.

The child finds its incarnation (0, 1, ...) in the environment variable RLSTACK_INCARNATION, and
says with `tell` how it ends. An end that the child does not call ordered is a failure, also with
exit code 0. Every failure is added to RECORD as one line of JSON. SIGTERM and SIGINT are passed on
to the child, which is then not restarted and is killed after GRACE seconds; this process then ends
with the exit code `SIGNALLED`. If this process is killed, the child is killed too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from types import FrameType
from typing import NamedTuple

INCARNATION = "RLSTACK_INCARNATION"
SIGNALLED = 113  # the exit code of a supervisor that was told to end
PARENT = "RLSTACK_PARENT"  # the process id of the parent, as the parent itself sets it
_END = "RLSTACK_END"  # the descriptor of a file in memory, which receives the child's `End`

_POLL_SECONDS = 0.02  # between two checks for a signal, in the pause before a restart
_PR_SET_PDEATHSIG = 1
_FALLOC_FL_KEEP_SIZE = 1
_RESERVED_BYTES = 1 << 16
_LONGEST_TEXT = 12_000  # characters of a traceback in the record
_SIGNALLED = "it was told to end by a signal (SIGTERM or SIGINT) that the program did not send"


class End(NamedTuple):
    """How a node ended."""

    ordered: bool = False  # by the coordinator or the learner
    reason: str = ""  # why it failed; empty if it did not
    traceback: str = ""
    node: str = ""  # the node to blame; empty for this one
    secondary: bool = False  # whether the failure of another node may be the cause
    passing: bool = False  # whether the same may succeed at the next try, as when a host is away
    ran_seconds: float = 0.0  # since the node began its work, without the time of its start


STOPPED = End(reason=_SIGNALLED, passing=True)  # of a node whose process received a signal


def tell(end: End) -> None:
    """Tells the supervisor of this process how it ends; without a supervisor, does nothing."""
    handle = os.environ.get(_END)
    if handle is not None:
        with contextlib.suppress(OSError):
            os.pwrite(int(handle), json.dumps(end).encode(), 0)


class RestartPolicy:
    """Decides whether something that failed is restarted, and after which pause."""

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
          max_restarts: in a row; one more failure is final.
          first_pause: seconds before the first restart; the pause doubles each time.
          longest_pause: the limit of that, in seconds.
          forgotten_after: seconds of running after which earlier failures no longer count.
          at_once: seconds of work within which the same error is taken to be permanent.
        """
        self.failures = 0
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
        reason = re.sub(r"0x[0-9a-f]+", "0x", end.reason)  # addresses of objects differ
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
      signal_number: of the signal.
      parent: its process id. It may have ended before this call; the signal then comes now.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def reserve_record(path: str) -> None:
    """Creates an empty record and reserves space for it, so that a full disk can be recorded."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with contextlib.suppress(OSError, AttributeError):
            allocate = ctypes.CDLL(None).fallocate
            allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            allocate(handle, _FALLOC_FL_KEEP_SIZE, 0, _RESERVED_BYTES)
    finally:
        os.close(handle)


def release_record(path: str) -> None:
    """Frees the space that a record does not use; removes an empty record."""
    with contextlib.suppress(OSError):
        size = os.path.getsize(path)
        if size:
            os.truncate(path, size)
        else:
            os.unlink(path)


def record_failure(path: str, *, node: str, end: End, **fields: object) -> None:
    """Adds one line to the record; lines of several processes do not mix.

    It raises nothing, because whoever records a failure has more to do: it says on standard error
    what could not be recorded.

    Args:
      path: of the record.
      node: the name of the node that failed.
      end: how it failed.
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


class _Signals:
    """Remembers that a signal asked for the end, and passes it on to the child."""

    def __init__(self, grace: float) -> None:
        self.received = 0  # the first signal
        self.child: subprocess.Popen[bytes] | None = None
        self._grace = grace
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._kill)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.received:
            signal.setitimer(signal.ITIMER_REAL, self._grace)
            self.received = number
        if self.child is not None:
            self.child.send_signal(number)

    def _kill(self, *_: object) -> None:
        if self.child is not None:
            self.child.kill()


def supervise(
    record: str, name: str, restarts: RestartPolicy, grace: float, command: list[str]
) -> int:
    """Runs the command until it ends as ordered, may not be restarted again, or a signal comes."""
    die_with_parent(signal.SIGTERM, parent_id())
    signals = _Signals(grace)
    while True:
        incarnation, started = restarts.failures, time.monotonic()
        code, end = _run(command, incarnation, signals)
        if end.ordered:
            return 0
        if signals.received:
            if end.traceback and not (end.secondary or end.passing):  # why the program ends, maybe
                record_failure(
                    record, node=name, end=end, incarnation=incarnation, restarts=False, ending=True
                )
            return SIGNALLED
        pause = restarts.failed(time.monotonic() - started, end)
        again = pause is not None
        record_failure(
            record, node=name, end=end, incarnation=incarnation, restarts=again, pause=pause
        )
        if pause is None:
            say(f"{name}: {end.reason}, after {restarts.failures - 1} restarts")
            return code if code > 0 else 128 - code if code < 0 else 1
        say(f"{name}: {end.reason}; restarts in {pause:g} s")
        until = time.monotonic() + pause
        while not signals.received and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if signals.received:
            return SIGNALLED


def _run(command: list[str], incarnation: int, signals: _Signals) -> tuple[int, End]:
    """Runs the command once; returns its exit code and how it ended."""
    parent, told = os.getpid(), os.memfd_create("end", 0)
    try:
        signals.child = child = subprocess.Popen(
            command,
            env={**os.environ, INCARNATION: str(incarnation), _END: str(told)},
            preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
            pass_fds=(told,),
        )
        if signals.received:  # before there was a child
            child.terminate()
        code = child.wait()
        text = os.pread(told, os.fstat(told).st_size, 0)
    except OSError as error:
        return 1, End(reason=f"it could not be started: {error}", passing=True)
    finally:
        os.close(told)
    with contextlib.suppress(ValueError, TypeError):
        end = End(*json.loads(text))
        if end.ordered or end.reason:
            return code, end
    ended = describe(code) if code else "it ended with exit code 0 before the program did"
    return code, End(reason=ended, passing=True)


def main(arguments: list[str]) -> int:
    """Supervises by the arguments of the command line."""
    record, name, max_restarts, grace, *rest = arguments
    times, command = rest[:4], rest[4:]
    with contextlib.suppress(ImportError):  # it also runs without the site's packages
        from setproctitle import setproctitle

        setproctitle(f"rlstack: supervisor:{name} {os.path.dirname(record)}")
    restarts = RestartPolicy(int(max_restarts), *map(float, times))
    try:
        return supervise(record, name, restarts, float(grace), command)
    except Exception as error:
        text = traceback.format_exc()
        end = End(reason=f"its supervisor failed: {type(error).__name__}: {error}", traceback=text)
        record_failure(record, node=name, end=end, incarnation=restarts.failures, restarts=False)
        say(text)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
