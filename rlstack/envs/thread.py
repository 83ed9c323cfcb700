"""Environments stepped by threads: for environments that wait, or that release Python's lock.

``recv`` raises the exception of an environment, with the environment's id, and an error if no step
ends within ``step_timeout``. The pool has then failed and can only be closed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time

import numpy as np

from rlstack.checks import EnvCrash
from rlstack.envs.adapters import EnvBuilder
from rlstack.envs.auto_reset import (
    AutoResetEnv,
    TimestepBuffer,
    build_all,
    builder_name,
    close_all,
    empty_buffer,
)
from rlstack.envs.backend import PoolConfig, spec_fields
from rlstack.envs.episode_metrics import by_name
from rlstack.envs.watch import Limit, Watch
from rlstack.types import TimeStep

# These threads mostly wait, so there may be more threads than cores.
_MAX_THREADS = 32
_CLOSE_SECONDS = 5.0
# A pool waits longer than an environment that observes the same limit itself, such as a game.
_PATIENCE = 1.1

_log = logging.getLogger(__name__)


class ThreadBackend:
    """Threads that share a queue of environments to step; see ``rlstack.envs.backend.Backend``."""

    def __init__(self, builder: EnvBuilder, config: PoolConfig):
        """Builds the environments in the caller's thread and starts the pool's threads."""
        self._size, self._wait = config.size, config.wait_num
        self._name = builder_name(builder)
        seeds = {i: config.seed + i for i in range(config.size)}
        self._watch = Watch(self._name)
        with self._watch.calls(
            "the builder", Limit(config.start_timeout, "start_timeout")
        ) as watch:
            self._envs = build_all(
                builder,
                config.options,
                seeds,
                config.step_info,
                config.first_index,
                config.levels,
                watch,
            )
        head = self._envs[0]
        self._shown = head.shown
        self.spec, self.action_dtypes, self.action_offsets = spec_fields(head.shown, head.action)
        self._announced = {i: env for i, env in self._envs.items() if env.announces}
        self._together = config.wait_num == config.size
        self._buffer = empty_buffer(head.shown.leaves, config.size)
        self._ids = np.arange(config.size, dtype=np.int32)
        self._metrics: dict[int, dict[str, float]] = {}  # id -> numbers of the last episode
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._step_timeout = config.step_timeout
        number = min(config.num_workers or _MAX_THREADS, config.size)
        self._busy: list[int | None] = [None] * number  # the environment that each thread steps
        self._threads = [
            threading.Thread(
                target=_work,
                args=(
                    self._envs,
                    self._buffer,
                    self._metrics,
                    self._tasks,
                    self._done,
                    self._busy,
                    i,
                ),
                name=f"rlstack-env-{i}",
                daemon=True,  # a pool that was not closed must not keep the program running
            )
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        """Starts a new episode in every environment."""
        for env in self._announced.values():
            env.announce(None, self._together)
        for i in range(self._size):
            self._tasks.put((i, None))

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        ids = self._ids if env_ids is None else env_ids
        if self._announced:
            for row, i in enumerate(ids.tolist()):
                if i in self._announced:
                    self._announced[i].announce([a[row] for a in actions], self._together)
        for row, i in enumerate(ids.tolist()):
            self._tasks.put((i, [a[row] for a in actions]))

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the rows of the first ``wait_num`` environments that are done.

        Raises:
          EnvError: an environment breaks the rules of its interface.
          EnvCrash: an environment raised an exception, or hangs.
        """
        found: list[int] = []
        failure: BaseException | None = None
        for _ in range(self._wait):
            try:
                i, error = self._done.get(timeout=_PATIENCE * self._step_timeout)
            except queue.Empty:
                raise self._hanging() from None
            found.append(i)
            failure = failure or error
        if failure is not None:
            raise failure
        ids = self._ids if self._wait == self._size else np.array(found, np.int32)
        buffer = self._buffer
        shown = self._shown.unflatten([leaf[ids] for leaf in buffer.leaves])
        return ids.copy(), TimeStep(
            buffer.step_type[ids], buffer.reward[ids], buffer.discount[ids], *shown
        )

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers of the last episodes of these environments, by name."""
        return by_name(self._metrics.get(i, {}) for i in env_ids.tolist())

    def _hanging(self) -> EnvCrash:
        ids = sorted(i for i in self._busy if i is not None)
        return EnvCrash(
            f"Env {', '.join(map(str, ids))} ({self._name}): a step must end within "
            f"step_timeout={self._step_timeout:g} s; it did not. Raise step_timeout if steps are "
            "slow; use type='process' for environments that hang, because their workers restart."
        )

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers in the info of the last step of each of these environments."""
        return [self._metrics.get(i, {}) for i in env_ids.tolist()]

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, always 0: a failing environment fails the pool."""
        return {"restarts": 0}

    def close(self) -> None:
        """Waits for the steps in progress, ends the threads and closes the environments.

        A thread cannot be ended while its environment hangs. After a few seconds such threads are
        left running, the environments stay open, and an error is logged.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for env in self._announced.values():
            env.interrupt()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.error(
                "ThreadBackend: environments must finish their steps before the pool closes; some "
                "hang, and their threads keep running. Use type='process' for them."
            )
            return
        self._threads = []
        envs, self._envs, self._announced = self._envs, {}, {}
        with self._watch.calls("close", Limit(self._step_timeout, "step_timeout")) as watch:
            close_all(envs, watch)


def _work(
    envs: dict[int, AutoResetEnv],
    buffer: TimestepBuffer,
    metrics: dict[int, dict[str, float]],
    tasks: queue.SimpleQueue,
    done: queue.SimpleQueue,
    busy: list[int | None],
    number: int,
) -> None:
    while (task := tasks.get()) is not None:
        i, action = task
        busy[number] = i
        error: BaseException | None = None
        try:
            if action is None:
                envs[i].reset(buffer, i)
            elif (found := envs[i].step(action, buffer, i)) is not None:
                metrics[i] = found
        except BaseException as caught:  # a SystemExit must not hang the caller
            error = caught
        busy[number] = None
        done.put((i, error))
