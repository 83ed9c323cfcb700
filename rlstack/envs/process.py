"""Environments stepped by worker processes, with data in shared memory.

One socket message a worker and step is all that travels beside it; nobody waits busily. A worker
that dies, raises, or hangs longer than ``step_timeout`` is replaced: its environments are built
anew with seeds of their own, and their episodes end as truncated (LAST, discount 1, reward 0, the
last good observation). More than ``max_restarts`` of these end the pool with the worker's
traceback; so does, at once, an environment that breaks the rules of its interface.
"""

from __future__ import annotations

import logging
import os
import select
import time
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

from rlstack.envs.adapters import EnvError
from rlstack.envs.base import PoolConfig, described
from rlstack.envs.child import Child, Died, end_all
from rlstack.envs.episode import LAST
from rlstack.envs.nest import Nest
from rlstack.envs.shared import Table, open_block
from rlstack.envs.worker import BANK, RESET, SHIFT, Hello, Setup
from rlstack.types import TimeStep

_CHECK_SECONDS = 1.0  # between looks at workers that are silent

_log = logging.getLogger(__name__)


class ProcessBackend:
    """Worker processes, each with a fixed share of the environments; see ``base.Backend``.

    Rows are copied out of shared memory by ``recv``, so that they belong to the caller.
    """

    def __init__(self, builder: Callable[..., Any], config: PoolConfig):
        """Starts the workers and waits until they have built their environments.

        Raises:
          EnvError: an environment breaks the rules.
          RuntimeError: a worker failed to start; the message holds its traceback.
          TypeError: the builder cannot be pickled.
        """
        try:
            self._builder = cloudpickle.dumps((builder, config.options))
        except Exception as error:
            raise TypeError(
                f"ProcessBackend: the builder and options must be picklable; {error}. Way out: a "
                "function or class at the top of a module."
            ) from error
        self._config = config
        size = self._size = config.size
        self._restarts = 0
        self._block = open_block()
        self._children: list[Child] = []
        # Also runs when the pool is forgotten, and at the end of the interpreter.
        self._finalizer = weakref.finalize(self, end_all, self._children, self._block, os.getpid())
        number = min(config.num_workers or os.cpu_count() or 1, size)
        shares = [ids.tolist() for ids in np.array_split(np.arange(size), number)]
        try:
            for ids in shares:
                self._children.append(self._start({i: config.seed + i for i in ids}))
            hellos = [self._greet(child) for child in self._children]
        except BaseException as error:
            self.close()
            if isinstance(error, Died):
                kind = EnvError if error.fatal else RuntimeError
                raise kind(f"ProcessBackend: a worker did not start. {error}") from None
            raise
        hello = hellos[0]
        self._observed, acted = Nest(hello.observation), Nest(hello.action)
        self.spec, self.action_dtypes, self.action_offsets = described(self._observed, acted)
        self._table = Table(self._block, self._observed.leaves, acted.leaves, size)
        self._poll = select.poll()
        self._by_fd: dict[int, Child] = {}
        for child in self._children:
            self._listen(child)
        self._next_check = 0.0
        self._bank = np.zeros(size, np.int32)  # which bank holds the last good row
        self._lost = np.zeros(size, bool)  # its worker died while the environment was held
        self._resetting = np.zeros(size, bool)
        self._ready: list[int] = []
        self._ids = np.arange(size, dtype=np.int32)

    def _start(self, seeds: dict[int, int]) -> Child:
        setup = Setup(
            self._builder,
            seeds,
            self._size,
            self._config.wait_num == self._size,
        )
        return Child(setup, self._block)

    def _listen(self, child: Child) -> None:
        self._by_fd[child.sock.fileno()] = child
        self._poll.register(child.sock, select.POLLIN)

    def _greet(self, child: Child) -> Hello:
        hello = child.greet(self._config.start_timeout)
        self._layout = getattr(self, "_layout", hello.layout)
        if hello.layout != self._layout:
            raise EnvError(
                f"ProcessBackend: all environments of a pool must have the same specs; envs "
                f"{child.env_ids} have {hello.layout}, others {self._layout}."
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
        for leaf, action in zip(self._table.actions, actions, strict=True):
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
        banks, resets = self._bank.tolist(), self._resetting.tolist()
        for child in self._children:
            ids = [i for i in child.env_ids if chosen[i]]
            if ids:
                child.order(
                    ids,
                    [i << SHIFT | (1 - banks[i]) * BANK | resets[i] * RESET for i in ids],
                    self._table.beats,
                )

    def _truncate(self, i: int) -> None:
        """Ends the episode of environment ``i`` where it stood."""
        row = self._table.banks[self._bank[i]]
        row.step_type[i], row.reward[i], row.discount[i] = LAST, 0.0, 1.0
        self._ready.append(i)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the rows of the first ``wait_num`` environments that are done.

        Raises:
          EnvError: an environment breaks the rules.
          RuntimeError: too many workers died; the message holds the last one's traceback.
        """
        while len(self._ready) < self._config.wait_num:
            self._wait()
        number = self._config.wait_num
        found, self._ready = self._ready[:number], self._ready[number:]
        ids = self._ids.copy() if number == self._size else np.array(found, np.int32)
        bank = self._bank[ids]
        step_type, reward, discount, *leaves = self._gather(ids, bank)
        return ids, TimeStep(step_type, reward, discount, self._observed.unflatten(leaves))

    def _gather(self, ids: np.ndarray, bank: np.ndarray) -> list[np.ndarray]:
        """Copies the rows ``ids`` out of the bank that each is in."""
        one = self._table.banks[int(bank[0])]
        columns = [one.step_type, one.reward, one.discount, *one.leaves]
        everything = len(ids) == self._size and self._config.wait_num == self._size
        copies = [c.copy() if everything else c[ids] for c in columns]
        if (other := bank != bank[0]).any():
            two = self._table.banks[1 - int(bank[0])]
            for copy, column in zip(
                copies, [two.step_type, two.reward, two.discount, *two.leaves], strict=True
            ):
                copy[other] = column[ids[other]]
        return copies

    def _wait(self) -> None:
        """Waits for answers of any worker, and replaces those that died or hang."""
        patience = min(_CHECK_SECONDS, self._config.step_timeout / 4)
        for fd, _ in self._poll.poll(1000 * patience):
            child = self._by_fd[fd]
            before = set(child.pending)
            try:
                child.read()
            except Died as died:
                self._answered(before - child.pending)
                self._replace(child, died)
            else:
                self._answered(before - child.pending)
        if time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + patience
            for child in [child for child in self._children if child.pending]:
                try:
                    child.check(self._table.beats, self._config.step_timeout)
                except Died as died:
                    self._replace(child, died)

    def _answered(self, ids: set[int]) -> None:
        for i in ids:
            self._bank[i] ^= 1
            self._resetting[i] = False
            self._ready.append(i)

    def _replace(self, child: Child, died: Died) -> None:
        """Puts a new worker in the place of ``child`` and ends the episodes that lived there."""
        del self._by_fd[child.sock.fileno()]
        self._poll.unregister(child.sock)
        child.end(0.0)
        where = self._children.index(child)
        while True:
            self._count_restart(died)
            seeds = {i: self._new_seed(i) for i in child.env_ids}
            self._children[where] = fresh = self._start(seeds)
            try:
                self._greet(fresh)
                break
            except Died as again:
                died = again
                fresh.end(0.0)
        self._listen(fresh)
        again_ids = []
        for i in child.env_ids:
            at_last = self._table.banks[self._bank[i]].step_type[i] == LAST
            if i not in child.pending:
                self._lost[i] |= not at_last
            elif at_last or self._resetting[i]:
                again_ids.append(i)
                self._resetting[i] = True
            else:
                self._truncate(i)
        chosen = np.zeros(self._size, bool)
        chosen[again_ids] = True
        self._order(chosen.tolist())

    def _count_restart(self, died: Died) -> None:
        if died.fatal:
            raise EnvError(f"ProcessBackend: an environment breaks the rules.\n{died}")
        if self._restarts >= self._config.max_restarts:
            raise RuntimeError(
                f"ProcessBackend: at most max_restarts={self._config.max_restarts} workers may "
                f"die; one more did.\n{died}"
            )
        self._restarts += 1
        _log.warning(
            "env worker restart %d; its episodes are cut off: %s", self._restarts, str(died)
        )

    def _new_seed(self, i: int) -> int:
        words = np.random.SeedSequence((self._config.seed + i, self._restarts)).generate_state(1)
        return int(words[0]) >> 1

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, the number of workers replaced."""
        return {"restarts": self._restarts}

    def close(self) -> None:
        """Ends the workers and frees the memory."""
        self._finalizer()
        self.__dict__.pop("_table", None)  # unmaps, even while a traceback still holds this object
