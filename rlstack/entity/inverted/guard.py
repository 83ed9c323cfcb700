"""Runs the program of a game, and kills it when the trainer ends, however it ends.

    python guard.py COMMAND...

`rlstack.entity.inverted.remote_game` starts this script, which starts the game. Its standard input
is a pipe that only the trainer writes to: it ends when the trainer does, also after SIGKILL. Then
the game and all processes of its group are killed. If this process is killed, the game is too. This
is plain Python, because there is one such process for each game.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it was killed before the call
        os._exit(1)


def _kill_when_trainer_ends() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Runs the command; returns its exit code, or 128 plus the number of the signal."""
    # The game is started before there is a thread, because code runs between fork and exec.
    die_with_parent = functools.partial(_die_with_parent, os.getpid())
    game = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    threading.Thread(target=_kill_when_trainer_ends, daemon=True).start()
    code = game.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
