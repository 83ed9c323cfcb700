"""Processes that are forked from this one, and so have its modules imported already."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


class Forked:
    """A forked child process, with a part of the interface of ``subprocess.Popen``.

    Attributes:
      pid: its process id.
    """

    def __init__(self, function: Callable[[], int]) -> None:
        """Forks; only the main thread may do so.

        Args:
          function: what the child runs; it returns the exit code.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _run(function)

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal that killed it; None while it runs."""
        if self._code is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self) -> int:
        """Returns the exit code when the process has ended."""
        if self._code is None:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Sends SIGTERM, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)


def _run(function: Callable[[], int]) -> NoReturn:
    """Runs the function in the child, and ends it without what its parent does at its own end."""
    code = 1
    try:
        code = function()
    except BaseException:
        with contextlib.suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
