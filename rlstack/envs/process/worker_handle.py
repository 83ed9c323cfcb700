"""The pool's handle on one worker process: it starts, commands, watches and ends the worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time

import numpy as np

from rlstack.envs.process.protocol import (
    BROKEN,
    CRASHED,
    METRICS,
    Hello,
    Setup,
    recv_message,
    send_message,
    unpack_metrics,
)

_CLOSE_SECONDS = 3.0  # seconds for a worker to finish its step and close its environments


class WorkerFailure(Exception):  # noqa: N818 (handled by the pool, not shown as an error)
    """A worker cannot continue.

    Attributes:
      reason: the first line of the text.
      fatal: whether a new worker would fail in the same way.
      hung: seconds without a finished step, 0 unless that is the failure.
    """

    def __init__(self, text: str, fatal: bool = False, hung: float = 0.0):
        super().__init__(text)
        self.reason = text.split("\n", 1)[0]
        self.fatal, self.hung = fatal, hung


def _naming(env_ids: list[int]) -> str:
    """Returns the code by which a worker names its process."""
    title = _title(env_ids)
    return f"import setproctitle; setproctitle.setproctitle({title!r}); " if title else ""


def _title(env_ids: list[int]) -> str:
    """Returns the title of a worker's process; it begins like the title of its parent.

    Without the package setproctitle it is empty.
    """
    envs = f"env/{env_ids[0]}-{env_ids[-1]}" if len(env_ids) > 1 else f"env/{env_ids[0]}"
    try:
        from setproctitle import getproctitle
    except ImportError:  # then processes have no titles
        return ""
    kind, _, parent = getproctitle().partition(": ")
    if kind != "rlstack" or not parent:
        return f"rlstack: {envs} of process {os.getpid()}"
    node, _, run_dir = parent.partition(" ")
    return f"rlstack: {node}:{envs} {run_dir}"


class WorkerHandle:
    """A worker process and its socket.

    The process starts from scratch, without a fork, because the parent may hold threads and locks
    of JAX. It does not import the parent's main module, so that scripts need no
    ``if __name__ == "__main__"`` guard.

    Attributes:
      env_ids: the environments of this worker.
      pending: the environments that have received an order and not answered it.
      metrics: the numbers to log of the last episode of each environment.
    """

    def __init__(self, setup: Setup, memory_fd: int):
        """Starts the process and sends it ``setup``."""
        self.env_ids = list(setup.seeds)
        self.pending: set[int] = set()
        self.metrics: dict[int, dict[str, float]] = {}
        self._partial = b""
        self._steps_done, self._last_progress = -1, 0.0
        self.sock, theirs = socket.socketpair()
        # The worker reads end of file from the sentinel when this process dies.
        sentinel, self._sentinel = os.pipe()
        fds = (theirs.fileno(), sentinel, memory_fd)
        # Ctrl-C goes to every process of the terminal; only the parent handles it. The worker
        # inherits the blocked signal, so that Python's start does not raise KeyboardInterrupt.
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
            "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT]); "
            f"{_naming(self.env_ids)}"
            f"sys.path[:] = {sys.path!r}; "
            f"from rlstack.envs.process.worker import main; main{fds}"
        )
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=fds
            )
        except BaseException:
            self.sock.close()
            os.close(self._sentinel)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
            os.close(sentinel)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_message(self.sock, pickle.dumps(setup))

    def greet(self, timeout: float) -> Hello:
        """Waits until the worker has built its environments.

        Raises:
          WorkerFailure: the worker failed, or took more than ``timeout`` seconds.
        """
        self.sock.settimeout(timeout)
        try:
            failure, hello = pickle.loads(recv_message(self.sock))
        except TimeoutError:
            raise WorkerFailure(
                f"Envs {self.env_ids}: must be built within start_timeout={timeout} s; they were "
                "not. Raise start_timeout if they are slow to build."
            ) from None
        except (EOFError, ConnectionResetError):
            raise WorkerFailure(f"Envs {self.env_ids}: {self._exit()} while building.") from None
        finally:
            self.sock.settimeout(None)
        if failure is not None:
            raise WorkerFailure(failure[1], failure[0] == BROKEN)
        return hello

    def order(self, env_ids: list[int], orders: list[int], steps_done: np.ndarray) -> None:
        """Sends ``orders`` for ``env_ids``; if the worker has ended, the next ``read`` raises."""
        if not self.pending:
            self._steps_done = int(steps_done[self.env_ids].sum())
            self._last_progress = time.monotonic()
        self.pending.update(env_ids)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(struct.pack(f"<{len(orders)}i", *orders))

    def read(self) -> None:
        """Removes environments that have answered from ``pending``; the socket must be readable.

        Raises:
          WorkerFailure: the worker has exited, or reports that it cannot continue.
        """
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise WorkerFailure(f"Envs {self.env_ids}: {self._exit()}.")
        data = self._partial + data
        at, whole = 0, len(data) // 4 * 4
        answers: list[int] = np.frombuffer(data[:whole], "<i4").tolist()
        if min(answers, default=0) >= 0:  # the common case: only ids
            self._partial = data[whole:]
            self.pending.difference_update(answers)
            return
        while 4 * at < whole:
            code = answers[at]
            # The bytes after a code are text, which may contain any number.
            if code in (CRASHED, BROKEN):
                raise WorkerFailure(self._text(data[4 * at + 4 :]), code == BROKEN)
            if code == METRICS:
                if (message := unpack_metrics(data, 4 * at)) is None:
                    break
                env_id, self.metrics[env_id], end = message
                at = end // 4
            else:
                self.pending.discard(code)
                at += 1
        self._partial = data[4 * at :]

    def _text(self, start: bytes) -> str:
        self.sock.settimeout(_CLOSE_SECONDS)
        with contextlib.suppress(OSError):
            while part := self.sock.recv(1 << 16):
                start += part
        return start.decode(errors="replace")

    def check(self, steps_done: np.ndarray, timeout: float) -> None:
        """Checks that a worker with pending orders is alive and makes progress.

        Raises:
          WorkerFailure: the worker has exited, or has finished no step for ``timeout`` seconds.
        """
        exited = self._process.poll() is not None
        if select.select([self.sock], [], [], 0)[0]:
            return  # read first: the message may contain the reason
        if exited:
            raise WorkerFailure(f"Envs {self.env_ids}: {self._exit()}.")
        count, now = int(steps_done[self.env_ids].sum()), time.monotonic()
        if count != self._steps_done:
            self._steps_done, self._last_progress = count, now
        elif now - self._last_progress > timeout:
            raise WorkerFailure(
                f"Envs {self.env_ids}: a step must finish within step_timeout={timeout:g} s; none "
                "did. Raise step_timeout if steps are slow.",
                hung=now - self._last_progress,
            )

    def _exit(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its socket"
        return f"the worker exited with code {code}"

    def ask_to_end(self) -> None:
        """Closes the sending side of the socket, so that the worker finishes its step and exits."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def end(self, deadline: float) -> None:
        """Waits for the worker to exit until ``deadline`` (``time.monotonic``), then kills it."""
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


def end_all(workers: list[WorkerHandle], memory_fd: int, owner: int) -> None:
    """Ends all workers and closes the memory; does nothing in a fork of the process ``owner``."""
    if os.getpid() != owner:
        return
    try:
        for worker in workers:
            worker.ask_to_end()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in workers:
            worker.end(deadline)
    except BaseException:  # a second Ctrl-C during the wait: kill immediately
        for worker in workers:
            worker.end(0.0)
        raise
    finally:
        workers.clear()
        os.close(memory_fd)
