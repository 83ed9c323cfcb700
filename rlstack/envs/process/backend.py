"""Environments stepped by worker processes, with data in shared memory.

In addition to shared memory, each worker receives one socket message per step. There are no busy
loops. A worker that exits, raises, or hangs longer than ``step_timeout`` is replaced: its
environments are built again with new seeds, and their episodes end as truncated (LAST, discount 1,
reward 0, the last complete observation). Each replacement logs one line with its reason. The pool
fails with the worker's traceback after more than ``max_restarts`` replacements within
``restart_window``, or immediately if an environment breaks the rules of its interface.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref

import cloudpickle
import numpy as np

from rlstack.checks import EnvCrash, EnvError, WrongKindError
from rlstack.envs.adapters import EnvBuilder
from rlstack.envs.auto_reset import LAST, SpecSignature
from rlstack.envs.backend import PoolConfig, spec_fields
from rlstack.envs.episode_metrics import by_name
from rlstack.envs.nest import Nest, StepNest
from rlstack.envs.process.protocol import (
    BROKEN,
    BUFFER,
    CRASHED,
    METRICS,
    RESET,
    SHIFT,
    Hello,
    Setup,
    SharedArrays,
    open_memory,
    recv_message,
    send_message,
    unpack_metrics,
)
from rlstack.envs.process.restarts import RestartLimit
from rlstack.types import TimeStep

_CHECK_SECONDS = 1.0  # between checks of workers that have not answered
_CLOSE_SECONDS = 3.0  # seconds for a worker to finish its step and close its environments

_log = logging.getLogger(__name__)


class ProcessBackend:
    """Worker processes, each with a fixed share of the environments; see ``Backend``.

    ``recv`` copies rows out of shared memory, so that they belong to the caller.
    """

    def __init__(self, builder: EnvBuilder, config: PoolConfig):
        """Starts the workers and waits until they have built their environments.

        Raises:
          EnvError: an environment breaks the rules of its interface.
          EnvCrash: a worker failed to start; the error's cause has its traceback.
          WrongKindError: the builder cannot be pickled.
        """
        try:
            self._builder = cloudpickle.dumps((builder, config.options))
        except Exception as error:
            raise WrongKindError(
                f"ProcessBackend: the builder and options must be picklable; {error}. Use a "
                "function or class at the top level of a module."
            ) from error
        self._config = config
        size = self._size = config.size
        self.last_restart = ""  # the reason of the last restart
        self._limit = RestartLimit(config.max_restarts, config.restart_window)
        self._working_since = time.monotonic()
        self._memory_fd = open_memory()
        self._workers: list[WorkerHandle] = []
        # Also runs when the pool is garbage-collected, and at interpreter exit.
        self._finalizer = weakref.finalize(
            self, end_all, self._workers, self._memory_fd, os.getpid()
        )
        self._signature: SpecSignature | None = None  # signature of the first worker's environments
        number = min(config.num_workers or os.cpu_count() or 1, size)
        shares = [ids.tolist() for ids in np.array_split(np.arange(size), number)]
        try:
            for ids in shares:
                seeds = {i: config.seed + i for i in ids}
                self._workers.append(self._start(seeds, config.first_index))
            hellos = [self._greet(worker) for worker in self._workers]
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerFailure):
                kind = EnvError if error.fatal else EnvCrash
                raise kind(f"ProcessBackend: a worker did not start. {error.reason}") from error
            raise
        hello = hellos[0]
        self._shown = StepNest(hello.observation, hello.extras)
        action = Nest(hello.action)
        self.spec, self.action_dtypes, self.action_offsets = spec_fields(self._shown, action)
        self._arrays = SharedArrays(self._memory_fd, self._shown.leaves, action.leaves, size)
        self._poll = select.poll()
        self._by_fd: dict[int, WorkerHandle] = {}
        for worker in self._workers:
            self._listen(worker)
        self._next_check = 0.0
        self._current = np.zeros(size, np.int32)  # the buffer with the last complete timestep
        self._lost = np.zeros(size, bool)  # whether the worker exited while the caller held the row
        self._resetting = np.zeros(size, bool)
        self._ready: list[int] = []
        self._metrics: dict[int, dict[str, float]] = {}  # id -> numbers of the last episode
        self._ids = np.arange(size, dtype=np.int32)

    def _start(self, seeds: dict[int, int], first_index: int | None = None) -> WorkerHandle:
        together = self._config.wait_num == self._size
        infos, levels = self._config.step_info, self._config.levels
        setup = Setup(self._builder, seeds, self._size, together, infos, first_index, levels)
        return WorkerHandle(setup, self._memory_fd)

    def _listen(self, worker: WorkerHandle) -> None:
        self._by_fd[worker.sock.fileno()] = worker
        self._poll.register(worker.sock, select.POLLIN)

    def _greet(self, worker: WorkerHandle) -> Hello:
        hello = worker.greet(self._config.start_timeout)
        self._signature = self._signature or hello.signature
        if hello.signature != self._signature:
            raise EnvError(
                f"ProcessBackend: all environments of a pool must have the same specs; envs "
                f"{worker.env_ids} have {hello.signature}, others {self._signature}."
            )
        return hello

    def reset(self) -> None:
        """Starts a new episode everywhere."""
        self._lost[:] = False
        self._resetting[:] = True
        self._order([True] * self._size)

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        ids = self._ids if env_ids is None else env_ids
        for leaf, action in zip(self._arrays.actions, actions, strict=True):
            leaf[ids] = action
        chosen = np.zeros(self._size, bool)
        chosen[ids] = True
        for i in np.flatnonzero(chosen & self._lost).tolist():
            self._truncate(i)
        chosen &= ~self._lost
        self._lost[ids] = False
        self._order(chosen.tolist())

    def _order(self, chosen: list[bool]) -> None:
        """Sends each worker one message with its share of the ``chosen`` environments."""
        current, resets = self._current.tolist(), self._resetting.tolist()
        for worker in self._workers:
            ids = [i for i in worker.env_ids if chosen[i]]
            if ids:
                worker.order(
                    ids,
                    [i << SHIFT | (1 - current[i]) * BUFFER | resets[i] * RESET for i in ids],
                    self._arrays.steps_done,
                )

    def _truncate(self, i: int) -> None:
        """Turns the last complete timestep of environment ``i`` into the end of its episode."""
        buffer = self._arrays.buffers[self._current[i]]
        buffer.step_type[i], buffer.reward[i], buffer.discount[i] = LAST, 0.0, 1.0
        self._metrics.pop(i, None)
        self._ready.append(i)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the rows of the first ``wait_num`` environments that are done.

        Raises:
          EnvError: an environment breaks the rules of its interface.
          EnvCrash: too many workers failed; the error's cause has the last one's traceback.
        """
        while len(self._ready) < self._config.wait_num:
            self._wait()
        number = self._config.wait_num
        found, self._ready = self._ready[:number], self._ready[number:]
        ids = self._ids.copy() if number == self._size else np.array(found, np.int32)
        step_type, reward, discount, *leaves = self._gather(ids, self._current[ids])
        return ids, TimeStep(step_type, reward, discount, *self._shown.unflatten(leaves))

    def _gather(self, ids: np.ndarray, current: np.ndarray) -> list[np.ndarray]:
        """Copies the rows ``ids``, each from its current buffer."""
        one = self._arrays.buffers[int(current[0])]
        arrays = [one.step_type, one.reward, one.discount, *one.leaves]
        everything = len(ids) == self._size and self._config.wait_num == self._size
        copies = [x.copy() if everything else x[ids] for x in arrays]
        if (other := current != current[0]).any():
            two = self._arrays.buffers[1 - int(current[0])]
            for copy, array in zip(
                copies, [two.step_type, two.reward, two.discount, *two.leaves], strict=True
            ):
                copy[other] = array[ids[other]]
        return copies

    def _wait(self) -> None:
        """Waits for an answer of any worker, and replaces workers that have exited or hang."""
        timeout = min(_CHECK_SECONDS, self._config.step_timeout / 4)
        for fd, _ in self._poll.poll(1000 * timeout):
            worker = self._by_fd[fd]
            before = set(worker.pending)
            try:
                worker.read()
            except WorkerFailure as failure:
                self._answered(worker, before - worker.pending)
                self._replace(worker, failure)
            else:
                self._answered(worker, before - worker.pending)
        if time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + timeout
            for worker in [worker for worker in self._workers if worker.pending]:
                try:
                    worker.check(self._arrays.steps_done, self._config.step_timeout)
                except WorkerFailure as failure:
                    self._replace(worker, failure)

    def _answered(self, worker: WorkerHandle, ids: set[int]) -> None:
        if worker.metrics:
            self._metrics.update(worker.metrics)
            worker.metrics = {}
        for i in ids:
            self._current[i] ^= 1
            self._resetting[i] = False
            self._ready.append(i)

    def _replace(self, worker: WorkerHandle, failure: WorkerFailure) -> None:
        """Replaces ``worker`` by a new worker, and truncates the episodes that it was running."""
        del self._by_fd[worker.sock.fileno()]
        self._poll.unregister(worker.sock)
        worker.end(0.0)
        where = self._workers.index(worker)
        while True:
            self._count_restart(failure)
            seeds = {i: self._new_seed(i) for i in worker.env_ids}
            self._workers[where] = fresh = self._start(seeds)
            try:
                self._greet(fresh)
                break
            except WorkerFailure as next_failure:
                failure = next_failure
                fresh.end(0.0)
            finally:
                self._working_since = time.monotonic()
        self._listen(fresh)
        again_ids = []
        for i in worker.env_ids:
            at_last = self._arrays.buffers[self._current[i]].step_type[i] == LAST
            if i not in worker.pending:
                self._lost[i] |= not at_last
            elif at_last or self._resetting[i]:
                again_ids.append(i)
                self._resetting[i] = True
            else:
                self._truncate(i)
        chosen = np.zeros(self._size, bool)
        chosen[again_ids] = True
        self._order(chosen.tolist())

    def _count_restart(self, failure: WorkerFailure) -> None:
        if failure.fatal:
            raise EnvError(
                "ProcessBackend: an environment breaks the rules of its interface: "
                f"{failure.reason}"
            ) from failure
        worked = time.monotonic() - self._working_since - failure.hung
        if not self._limit.count(worked):
            raise EnvCrash(
                f"ProcessBackend: there may be {self._limit.text} "
                f"(max_restarts={self._config.max_restarts}); one more worker failed: "
                f"{failure.reason}"
            ) from failure
        self.last_restart = failure.reason
        _log.warning(
            "env worker restarted (%d so far), its episodes are truncated: %s",
            self._limit.total,
            failure.reason,
        )

    def _new_seed(self, i: int) -> int:
        words = np.random.SeedSequence((self._config.seed + i, self._limit.total)).generate_state(1)
        return int(words[0]) >> 1

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers of the last episodes of these environments, by name."""
        return by_name(self._metrics.get(i, {}) for i in env_ids.tolist())

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers in the info of the last step of each of these environments."""
        return [self._metrics.get(i, {}) for i in env_ids.tolist()]

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, the number of workers replaced."""
        return {"restarts": self._limit.total}

    def close(self) -> None:
        """Ends the workers and frees the memory."""
        self._finalizer()
        self.__dict__.pop("_arrays", None)  # unmaps, even while a traceback still holds this object


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
