"""Environments stepped by threads: for those that wait, or that release Python's lock.

An exception in an environment is raised from ``recv``, with the environment's id; the pool has
failed then and can only be closed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlstack.envs.base import PoolConfig, described
from rlstack.envs.episode import Rows, build, close_all
from rlstack.types import TimeStep

# Waiting is what these threads are for, so there may be many more than cores.
_MOST_THREADS = 32
_CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class ThreadBackend:
    """Threads that share a queue of environments to step; see ``rlstack.envs.base.Backend``."""

    def __init__(self, builder: Callable[..., Any], config: PoolConfig):
        """Builds the environments here and starts the threads."""
        self._size, self._wait = config.size, config.wait_num
        self._episodes = build(
            builder, config.options, {i: config.seed + i for i in range(config.size)}
        )
        head = self._episodes[0]
        self._observed = head.observed
        self.spec, self.action_dtypes, self.action_offsets = described(head.observed, head.acted)
        self._told = {i: e for i, e in self._episodes.items() if e.announces}
        self._together = config.wait_num == config.size
        self._rows = Rows(head.observed.leaves, config.size)
        self._ids = np.arange(config.size, dtype=np.int32)
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        number = min(config.num_workers or _MOST_THREADS, config.size)
        self._threads = [
            threading.Thread(
                target=_work,
                args=(self._episodes, self._rows, self._tasks, self._done),
                name=f"rlstack-env-{i}",
                daemon=True,  # so that a pool nobody closed does not keep the program alive
            )
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        """Starts a new episode everywhere."""
        for episode in self._told.values():
            episode.announce(None, self._together)
        for i in range(self._size):
            self._tasks.put((i, None))

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        ids = self._ids if env_ids is None else env_ids
        if self._told:
            for row, i in enumerate(ids.tolist()):
                if i in self._told:
                    self._told[i].announce([a[row] for a in actions], self._together)
        for row, i in enumerate(ids.tolist()):
            self._tasks.put((i, [a[row] for a in actions]))

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the rows of the first ``wait_num`` environments that are done.

        Raises:
          EnvError, EnvCrash: what one of them raised.
        """
        found: list[int] = []
        failure: BaseException | None = None
        for _ in range(self._wait):
            i, error = self._done.get()
            found.append(i)
            failure = failure or error
        if failure is not None:
            raise failure
        ids = self._ids if self._wait == self._size else np.array(found, np.int32)
        rows = self._rows
        observation = self._observed.unflatten([leaf[ids] for leaf in rows.leaves])
        return ids.copy(), TimeStep(
            rows.step_type[ids], rows.reward[ids], rows.discount[ids], observation
        )

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, always 0: a failing environment fails the pool."""
        return {"restarts": 0}

    def close(self) -> None:
        """Waits for the steps in progress, ends the threads and closes the environments.

        A thread whose environment hangs cannot be ended: after a while it is left behind, with
        its environments unclosed, and that is logged.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for episode in self._told.values():
            episode.interrupt()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.error("env threads hang in a step and are left behind; use type='process'")
            return
        self._threads = []
        episodes, self._episodes, self._told = self._episodes, {}, {}
        close_all(episodes)


def _work(episodes: dict, rows: Rows, tasks: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        i, action = task
        error: BaseException | None = None
        try:
            if action is None:
                episodes[i].reset(rows, i)
            else:
                episodes[i].step(action, rows, i)
        except BaseException as caught:  # SystemExit from an environment must not hang the caller
            error = caught
        done.put((i, error))
