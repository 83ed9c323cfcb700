"""Runs a command again until it succeeds: keeps restartable nodes alive.

    python supervisor.py RECORD NAME MAX_RESTARTS GRACE FIRST_PAUSE LONGEST_PAUSE FORGOTTEN_AFTER \
        COMMAND...

Launchpad ends a whole program when one of its processes fails, and does not say how it ended. So
Launchpad's process is this script, and the node itself is its child. A failed actor, evaluator or
inference service is restarted, and every node's failure is recorded. This is plain Python without
the stack's packages, because there is one such process for each node; all times are passed in.

The child finds its incarnation (0, 1, ...) in the environment variable RLSTACK_INCARNATION. Every
failure is added to RECORD as a line of JSON. SIGTERM and SIGINT are passed on to the child, which
is then not restarted and is killed after GRACE seconds. If this process is killed, the child is
killed too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType

INCARNATION = "RLSTACK_INCARNATION"

_POLL_SECONDS = 0.02  # between two checks for a signal, in the pause before a restart
_PR_SET_PDEATHSIG = 1


class RestartPolicy:
    """Decides whether something that failed is restarted, and after which pause."""

    def __init__(
        self,
        max_restarts: int,
        first_pause: float,
        longest_pause: float,
        forgotten_after: float,
    ) -> None:
        """Starts without failures.

        Args:
          max_restarts: in a row; one more failure is final.
          first_pause: seconds before the first restart; the pause doubles each time.
          longest_pause: the limit of that, in seconds.
          forgotten_after: seconds of running after which earlier failures no longer count.
        """
        self.failures = 0
        self._in_a_row = 0
        self._max_restarts = max_restarts
        self._first_pause, self._longest_pause = first_pause, longest_pause
        self._forgotten_after = forgotten_after

    def failed(self, lived_seconds: float) -> float | None:
        """Returns the seconds to wait before the restart, or None if there is none."""
        self.failures += 1
        self._in_a_row = 1 if lived_seconds >= self._forgotten_after else self._in_a_row + 1
        if self._in_a_row > self._max_restarts:
            return None
        return min(self._first_pause * 2 ** (self._in_a_row - 1), self._longest_pause)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Asks the kernel (Linux only) to signal this process when its parent ends."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != parent:  # it ended just before
        os.kill(os.getpid(), signal_number)


def record_failure(path: str, **fields: object) -> None:
    """Adds one line to the record; lines of several processes do not mix."""
    line = json.dumps({"time": time.time(), **fields}) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def describe(exit_code: int) -> str:
    """Returns a process's exit code in words."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


class _Signals:
    """Remembers that a signal asked for the end, and passes it on to the child."""

    def __init__(self, grace: float) -> None:
        self.received = False
        self.child: subprocess.Popen[bytes] | None = None
        self._grace = grace
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._kill)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.received:
            signal.setitimer(signal.ITIMER_REAL, self._grace)
        self.received = True
        if self.child is not None:
            self.child.send_signal(number)

    def _kill(self, *_: object) -> None:
        if self.child is not None:
            self.child.kill()


def supervise(
    record: str, name: str, restarts: RestartPolicy, grace: float, command: list[str]
) -> int:
    """Runs the command until it succeeds, may not be restarted again, or a signal comes."""
    die_with_parent()
    signals = _Signals(grace)
    while True:
        started = time.monotonic()
        signals.child = subprocess.Popen(
            command,
            env={**os.environ, INCARNATION: str(restarts.failures)},
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
        if signals.received:  # before there was a child
            signals.child.terminate()
        code = signals.child.wait()
        if code == 0 or signals.received:
            return code if code > 0 else 0
        incarnation = restarts.failures
        pause = restarts.failed(time.monotonic() - started)
        reason = describe(code)
        record_failure(
            record, node=name, incarnation=incarnation, reason=reason, restarts=pause is not None
        )
        if pause is None:
            print(f"{name}: {reason}, after {restarts.failures - 1} restarts", file=sys.stderr)
            return code if code > 0 else 128 - code
        print(f"{name}: {reason}; restarts in {pause:g} s", file=sys.stderr, flush=True)
        until = time.monotonic() + pause
        while not signals.received and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if signals.received:
            return 0


def main(arguments: list[str]) -> int:
    """Supervises by the arguments of the command line."""
    record, name, max_restarts, grace, first_pause, longest_pause, forgotten_after, *command = (
        arguments
    )
    restarts = RestartPolicy(
        int(max_restarts), float(first_pause), float(longest_pause), float(forgotten_after)
    )
    return supervise(record, name, restarts, float(grace), command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
