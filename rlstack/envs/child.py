"""The parent's side of one worker process of a process pool."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable

import numpy as np

from rlstack.envs.worker import BROKEN, CRASHED, Hello, Setup, recv_message, send_message

_CLOSE_SECONDS = 3.0  # for a worker to finish its step and close its environments


class Died(Exception):  # noqa: N818 (an event to handle, rather than an error to show)
    """A worker cannot go on; ``fatal`` when a new one could not either."""

    def __init__(self, text: str, fatal: bool = False):
        super().__init__(text)
        self.fatal = fatal


class Child:
    """A worker process and its socket.

    It is started afresh (no fork: the parent may hold JAX's threads and locks) and does not import
    the parent's main module, so scripts need no ``if __name__ == "__main__"`` guard.

    Attributes:
      env_ids: the environments that live there.
      pending: those of them that have orders and have not answered.
    """

    def __init__(self, setup: Setup, block: int):
        self.env_ids = list(setup.seeds)
        self.pending: set[int] = set()
        self._partial = b""
        self._beats, self._heard = -1, 0.0
        self.sock, theirs = socket.socketpair()
        sentinel, self._sentinel = os.pipe()  # the worker sees the end of it when we die
        fds = (theirs.fileno(), sentinel, block)
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from rlstack.envs.worker import main; main{fds}"
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=fds
            )
        except BaseException:
            self.sock.close()
            os.close(self._sentinel)
            raise
        finally:
            theirs.close()
            os.close(sentinel)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_message(self.sock, pickle.dumps(setup))

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def greet(self, timeout: float) -> Hello:
        """Waits until the worker has built its environments.

        Raises:
          Died: it failed, or took more than ``timeout`` seconds.
        """
        self.sock.settimeout(timeout)
        try:
            failure, hello = pickle.loads(recv_message(self.sock))
        except TimeoutError:
            raise Died(f"Envs {self.env_ids}: not built within {timeout} s.") from None
        except (EOFError, ConnectionResetError):
            raise Died(f"Envs {self.env_ids}: {self._exit()} while building.") from None
        finally:
            self.sock.settimeout(None)
        if failure is not None:
            raise Died(failure[1], failure[0] == BROKEN)
        return hello

    def order(self, env_ids: Iterable[int], orders: list[int], beats: np.ndarray) -> None:
        """Sends orders for ``env_ids``; a dead worker shows itself at the next ``read``."""
        if not self.pending:
            self._beats, self._heard = int(beats[self.env_ids].sum()), time.monotonic()
        self.pending.update(env_ids)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(struct.pack(f"<{len(orders)}i", *orders))

    def read(self) -> list[int]:
        """Returns the environments that answered, once the socket is readable.

        Raises:
          Died: the worker is gone, or says that it cannot go on.
        """
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Died(f"Envs {self.env_ids}: {self._exit()}.")
        data = self._partial + data
        whole = len(data) // 4 * 4
        self._partial = data[whole:]
        answers: list[int] = np.frombuffer(data[:whole], "<i4").tolist()
        for at, code in enumerate(answers):
            # What follows a code is text, which may look like any number.
            if code in (CRASHED, BROKEN):
                self.pending.difference_update(answers[:at])
                raise Died(self._text(data[4 * at + 4 :]), code == BROKEN)
        self.pending.difference_update(answers)
        return answers

    def _text(self, start: bytes) -> str:
        self.sock.settimeout(_CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            while part := self.sock.recv(1 << 16):
                start += part
        return start.decode(errors="replace")

    def check(self, beats: np.ndarray, timeout: float) -> None:
        """Looks after a busy worker.

        Raises:
          Died: it is gone, or has not finished a step for ``timeout`` seconds.
        """
        exited = self._process.poll() is not None
        if select.select([self.sock], [], [], 0)[0]:
            return  # there is something to read first, perhaps why it ended
        if exited:
            raise Died(f"Envs {self.env_ids}: {self._exit()}.")
        count, now = int(beats[self.env_ids].sum()), time.monotonic()
        if count != self._beats:
            self._beats, self._heard = count, now
        elif now - self._heard > timeout:
            raise Died(f"Envs {self.env_ids}: no step finished within {timeout} s.")

    def _exit(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its socket"
        return f"the worker exited with code {code}"

    def hang_up(self) -> None:
        """Asks the worker to finish."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def end(self, deadline: float) -> None:
        """Waits for the worker until ``deadline`` (monotonic seconds), then kills it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self.sock.close()
            if self._sentinel >= 0:
                os.close(self._sentinel)
                self._sentinel = -1


def end_all(children: list[Child], block: int, owner: int) -> None:
    """Ends all workers and closes the block; does nothing in a fork of process ``owner``."""
    if os.getpid() != owner:
        return
    try:
        for child in children:
            child.hang_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for child in children:
            child.end(deadline)
    except BaseException:  # a second Ctrl-C while we wait: no more patience
        for child in children:
            child.end(0.0)
        raise
    finally:
        children.clear()
        os.close(block)
