"""Runs a command again until it succeeds: what keeps restartable nodes alive.

    python supervise.py RECORD NAME MAX_RESTARTS GRACE COMMAND...

Launchpad ends a whole program when one of its processes fails, and does not say how it ended. So
a node is this script, and the node proper its child: an actor or an inference service is started
again, and of every node it is written down how it ended. This is plain Python without the packages
of the stack, because it costs a process for each node.

The child finds its incarnation (0, 1, ...) in the environment variable RLSTACK_INCARNATION. Every
failure is added to RECORD as a line of JSON. SIGTERM and SIGINT are handed on to the child, which
is not started again then and is killed after GRACE seconds; and it is killed when this process is.
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
from typing import Any

INCARNATION = "RLSTACK_INCARNATION"

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds before a restart; they double each time
_GOOD_SECONDS = 60.0  # who lived this long failed by accident: its restarts are forgotten
_PR_SET_PDEATHSIG = 1


class Backoff:
    """How often, and after how long, something that failed may be tried again."""

    def __init__(self, max_restarts: int) -> None:
        self.failures = 0
        self._recent = 0
        self._max_restarts = max_restarts

    def failed(self, lived_seconds: float) -> float | None:
        """Returns the seconds to wait before the next try, or None when there is none."""
        self.failures += 1
        self._recent = 1 if lived_seconds >= _GOOD_SECONDS else self._recent + 1
        if self._recent > self._max_restarts:
            return None
        return min(_FIRST_PAUSE * 2 ** (self._recent - 1), _LONGEST_PAUSE)


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Asks the kernel (Linux only) to signal this process when its parent ends."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != parent:  # it ended just before
        os.kill(os.getpid(), signal_number)


def record_failure(path: str, **fields: Any) -> None:
    """Adds one line to the record; lines of several processes do not mix."""
    line = json.dumps({"time": time.time(), **fields}) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def reason(code: int) -> str:
    """Puts a process's exit code in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


class _Stop:
    """Remembers that a signal asked for the end, and hands it on."""

    def __init__(self, grace: float) -> None:
        self.requested = False
        self.child: subprocess.Popen[bytes] | None = None
        self._grace = grace
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._kill)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.requested:
            signal.setitimer(signal.ITIMER_REAL, self._grace)
        self.requested = True
        if self.child is not None:
            self.child.send_signal(number)

    def _kill(self, *_: object) -> None:
        if self.child is not None:
            self.child.kill()


def supervise(record: str, name: str, max_restarts: int, grace: float, command: list[str]) -> int:
    """Runs the command until it succeeds, may not be restarted again, or a signal comes."""
    die_with_parent()
    stop, backoff = _Stop(grace), Backoff(max_restarts)
    while True:
        begun = time.monotonic()
        environment = {**os.environ, INCARNATION: str(backoff.failures)}
        stop.child = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
        if stop.requested:  # it came before there was a child
            stop.child.terminate()
        code = stop.child.wait()
        if code == 0 or stop.requested:
            return code if code > 0 else 0
        pause = backoff.failed(time.monotonic() - begun)
        fields = {"node": name, "incarnation": backoff.failures - 1, "reason": reason(code)}
        record_failure(record, **fields, restarts=pause is not None)
        if pause is None:
            print(f"{name}: {reason(code)}, after {max_restarts} restarts", file=sys.stderr)
            return code if code > 0 else 128 - code
        print(f"{name}: {reason(code)}; starts again in {pause:g} s", file=sys.stderr, flush=True)
        until = time.monotonic() + pause
        while not stop.requested and time.monotonic() < until:
            time.sleep(0.02)
        if stop.requested:
            return 0


if __name__ == "__main__":
    record, name, max_restarts, grace, *command = sys.argv[1:]
    sys.exit(supervise(record, name, int(max_restarts), float(grace), command))
