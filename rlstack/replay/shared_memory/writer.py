"""The writer's side of a shared replay buffer, and the handle that makes writers."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayClosedError
from rlstack.replay.shared_memory.block import Block, start_time
from rlstack.replay.shared_memory.flow_control import Ids, InsertLimiter, PollingWait
from rlstack.replay.shared_memory.steps import (
    CLOSED,
    ENDED,
    NEWS,
    OWNER_PID,
    OWNER_START,
    Columns,
    SharedSteps,
    memory_fence,
)
from rlstack.replay.step_counter import StepCounter
from rlstack.types import StepType, Transition

NAME = "SharedMemReplayBuffer"  # in messages

_LAST = int(StepType.LAST)
_HANDOVER = 2.0  # seconds that a writer waits for the previous one to end
_CHECK_PERIOD = 1.0  # seconds between two checks that the owner is alive


class SharedMemWriter:
    """Adds steps of some environments to another process's `SharedMemReplayBuffer`.

    Each writing thread needs its own writer, for its own environments. A writer claims an
    environment when it first adds a step of it, or earlier by ``claim``. When a writer has ended,
    another one may claim its environments; their steps then begin with a gap.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        shared: SharedSteps,
        where: str,
        *,
        resumes: bool = False,
    ):
        """Makes a writer without environments; only `SharedMemHandle` calls this.

        Args:
          cfg: rules of the table.
          num_envs: environments of all writers.
          shared: the steps of the buffer.
          where: the buffer's name, for messages.
          resumes: whether the first steps of an environment continue loaded steps, if no writer has
              claimed the environment since the buffer was made or loaded.
        """
        self._cfg, self._num_envs, self._where = cfg, num_envs, where
        self._shared, self._numbers, self.spec = shared, shared.counters, shared.spec
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._limiter = InsertLimiter(cfg, num_envs, shared.counters, where)
        self._ids = StepCounter(num_envs)  # used to check ids
        # The next step of each claimed environment; that of `_in_step` is `_step`.
        self._steps = np.zeros(num_envs, np.int64)
        self.mine = np.zeros(num_envs, bool)  # the claimed environments
        self._all_mine = False
        self._in_step: slice | None = None  # environments that are at the same step
        self._step = 0
        self._columns: Columns  # the columns of `_in_step`
        self._not_last = cfg.starts == "not_last"
        self._last_end = 0  # the newest step at which some environment of `_in_step` was LAST
        self._no_last = b""  # the newest step types of which none was LAST
        self._last_gap = int(shared.counters.unbroken.max())  # later items are unbroken
        self._resumes = resumes
        self._me = (os.getpid(), start_time(os.getpid()), secrets.randbits(62))
        self._next_check = 0.0
        self._closed = False
        self._refused_at: float | None = None  # time of the last refusal by `may_write`

    def claim(self, env_ids: np.ndarray) -> None:
        """Makes this the writer of some environments.

        Raises:
          ValueError: another running process is the writer of one of them.
        """
        numbers = self._numbers
        self._separate()
        wait = PollingWait(_HANDOVER)  # the previous writer may have just been killed
        for env in env_ids.tolist():
            pid = int(numbers.pid[env])
            while pid not in (0, self._me[0]) and start_time(pid) == numbers.start_time[env]:
                if not wait.sleep():
                    raise ValueError(
                        f"{self._where}.add: environment {env} must have one writer; process {pid} "
                        "already writes it. Give every actor a rank of its own."
                    )
        follows_on = self._resumes & (numbers.pid[env_ids] == 0)
        numbers.pid[env_ids], numbers.start_time[env_ids], numbers.token[env_ids] = self._me
        numbers.blocked[env_ids] = 0
        self._steps[env_ids] = numbers.steps[env_ids]
        self.mine[env_ids] = True
        self._all_mine = bool(self.mine.all())
        self._break(env_ids[~follows_on])

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; waits while the buffer is full."""
        self.check_open("add")
        ids, leaves = self.prepare(env_ids, transition)
        if self._limiter.may_block and self.blocking_rule(ids):
            self.wait(lambda: self.blocking_rule(ids), timeout)
        self.write(ids, leaves)

    def prepare(
        self, env_ids: np.ndarray | None, transition: Transition
    ) -> tuple[Ids, list[np.ndarray]]:
        """Checks ids and leaves, and claims new environments; returns both."""
        ids = self.checked(env_ids, "add")
        count = ids.stop - ids.start if isinstance(ids, slice) else len(ids)
        leaves = self._shared.ring.leaves(transition, count)
        self._claim_new(ids)
        return ids, leaves

    def checked(self, env_ids: np.ndarray | None, where: str) -> Ids:
        """Returns ids as a slice if they are consecutive, else as an array of distinct ids."""
        if env_ids is None:
            return slice(0, self._num_envs)
        if isinstance(env_ids, np.ndarray) and env_ids.dtype.kind in "iu" and env_ids.ndim == 1:
            first = int(env_ids[0]) if len(env_ids) else 0
            order = self._ids.envs[first : first + len(env_ids)] if first >= 0 else env_ids[:0]
            if len(order) == len(env_ids) == np.count_nonzero(env_ids == order):
                return slice(first, first + len(order))
        ids = self._ids.check_ids(f"{self._where}.{where}", env_ids)
        return slice(0, self._num_envs) if ids is None else ids

    def _claim_new(self, ids: Ids) -> None:
        if not self._all_mine:
            envs = self._ids.envs[ids]
            fresh = envs[~self.mine[envs]]
            if fresh.size:
                self.claim(fresh)

    def blocking_rule(self, ids: Ids) -> str:
        """Returns the name of the rule that blocks the next step of these environments, or ""."""
        step = self._common_step(ids)
        return self._limiter.blocking_rule(ids, self._steps[ids] if step is None else step)

    def _common_step(self, ids: Ids) -> int | None:
        """Returns the step that consecutive environments are all at; else None.

        After None, `_steps` holds the next step of each claimed environment.
        """
        if isinstance(ids, slice) and self._in_step == ids:
            return self._step
        self._separate()
        if not isinstance(ids, slice):
            return None
        steps = self._steps[ids]
        if not len(steps) or np.count_nonzero(steps == steps[0]) < len(steps):
            return None
        self._in_step, self._step = ids, int(steps[0])
        self._columns = self._shared.columns(ids)
        self._last_end = self._step - 1  # the types of earlier steps are not known here
        return self._step

    def _separate(self) -> None:
        """Starts to count the steps of each environment separately."""
        if self._in_step is not None:
            self._steps[self._in_step] = self._step
            self._in_step = None

    def wait(self, blocking_rule: Callable[[], str], timeout: float | None) -> None:
        """Waits until no rule blocks.

        Raises:
          ReplayTimeoutError: a rule blocked during the whole wait.
          ReplayClosedError: the owner has closed the buffer, or has ended.
        """
        numbers, mine = self._numbers, np.flatnonzero(self.mine)
        wait = PollingWait(self._cfg.timeout_seconds if timeout is None else timeout)
        try:
            while True:
                news = int(numbers.head[NEWS])  # read first: the call below sees at least this
                memory_fence()
                found = blocking_rule()
                if not found:
                    return
                numbers.blocked[mine] = 1 + news
                if not wait.sleep():
                    raise self._limiter.timed_out(found)
                self.check_open("add")
        finally:
            numbers.blocked[mine] = 0
            numbers.waited[mine[0]] += int(wait.seconds * 1e6)

    def may_write(self, ids: Ids, seconds: float) -> str:
        """Waits as `wait`; returns "" if a step may be written, else why it may not.

        After a refusal the environments count as waiting until this method is called again.
        """
        numbers, wait = self._numbers, None
        while True:
            news = int(numbers.head[NEWS])  # read first: the call below sees at least this
            memory_fence()
            found = self.blocking_rule(ids)
            if not found and self._refused_at is None:
                return ""
            mine, now = np.flatnonzero(self.mine), time.monotonic()
            if self._refused_at is not None:
                numbers.waited[mine[0]] += int((now - self._refused_at) * 1e6)
            self._refused_at = now if found else None
            numbers.blocked[mine] = 1 + news if found else 0
            if not found:
                return ""
            wait = wait or PollingWait(seconds)
            if not wait.sleep():
                return str(self._limiter.timed_out(found))
            self.check_open("add")

    def write(self, ids: Ids, leaves: list[np.ndarray]) -> None:
        """Publishes one step of each of these environments; ``steps`` documents the order."""
        shared, step = self._shared, self._common_step(ids)
        if step is not None:
            columns = self._columns
            columns.reserved.fill(step + 1)
            memory_fence()
            self._mark_all(step, leaves[0])
            shared.ring.write_columns(step, columns.rings, leaves)
            memory_fence()
            columns.steps.fill(step + 1)
            self._step = step + 1
            return
        numbers, envs, steps = self._numbers, self._ids.envs[ids], self._steps[ids]
        numbers.reserved[ids] = steps + 1
        memory_fence()
        shared.ring.write(steps, envs, leaves)
        self._mark(envs, steps)
        memory_fence()
        numbers.steps[ids] = self._steps[ids] = steps + 1

    def _mark_all(self, step: int, step_types: np.ndarray) -> None:
        """Marks a step if it ends unbroken items. Old marks do no harm: they name older steps.

        Args:
          step: the number of the step, the same for all environments of `_in_step`.
          step_types: the step types of this step, [n].
        """
        start, context = step - self._length, self._cfg.context
        if self._not_last and not (step - context) % self._period:  # items may begin here
            types = np.asarray(step_types).tobytes()
            if types != self._no_last:  # mostly they are equal, and comparing bytes is faster
                if np.count_nonzero(step_types == _LAST):
                    self._last_end = step
                else:
                    self._no_last = types
        if start < 0 or start % self._period:
            return
        columns, row = self._columns, step % self._shared.ring.rows
        if start < self._last_gap:
            assert self._in_step is not None
            envs = self._ids.envs[self._in_step]
            self._mark(envs, np.full(len(envs), step))
        elif self._not_last and start + context <= self._last_end:
            first = columns.step_type[(start + context) % self._shared.ring.rows]
            np.multiply(first != _LAST, step + 1, out=columns.marks[row])
        else:
            columns.marks[row].fill(step + 1)

    def _mark(self, envs: np.ndarray, steps: np.ndarray) -> None:
        """Marks the steps that end an unbroken item."""
        starts = steps - self._length
        due = (starts >= 0) & (starts % self._period == 0)
        if not np.count_nonzero(due):
            return
        shared = self._shared
        due &= self._numbers.unbroken[envs] <= starts
        if self._cfg.starts == "not_last":
            at = (starts + self._cfg.context) % shared.ring.rows
            due &= shared.ring.step_type[at, envs] != _LAST
        shared.marks[steps % shared.ring.rows, envs] = np.where(due, steps + 1, 0)

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: added steps are available immediately."""

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step starts new ones."""
        self.check_open("gap")
        ids = self.checked(env_ids, "gap")
        self._claim_new(ids)
        self._break(self._ids.envs[ids])

    def _break(self, env_ids: np.ndarray) -> None:
        """Moves the step counts forward to where an item can begin."""
        numbers = self._numbers
        self._separate()
        after = -(-self._steps[env_ids] // self._period) * self._period
        self._last_gap = max(self._last_gap, int(after.max(initial=0)))
        numbers.unbroken[env_ids] = after
        # It may already be larger, by one step that a killed writer left half written.
        numbers.reserved[env_ids] = np.maximum(numbers.reserved[env_ids], after)
        memory_fence()
        numbers.steps[env_ids] = after
        self._steps[env_ids] = after

    def check_open(self, where: str) -> None:
        """Raises if the buffer is closed, its owner has ended, or another writer has taken over."""
        numbers = self._numbers
        if self._closed or numbers.head[CLOSED]:
            raise ReplayClosedError(f"{self._where}.{where}: the buffer is closed.")
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_PERIOD
        if start_time(int(numbers.head[OWNER_PID])) != numbers.head[OWNER_START]:
            raise ReplayClosedError(f"{self._where}.{where}: the owner process has ended.")
        taken = self.mine & (numbers.token != self._me[2])
        if taken.any():
            raise ReplayClosedError(
                f"{self._where}.{where}: environments {np.flatnonzero(taken).tolist()!r:.100} "
                "have another writer now."
            )

    def close(self) -> None:
        """Releases the environments; the added steps remain."""
        if self._closed:
            return
        self._closed = True
        mine = self.mine & (self._numbers.token == self._me[2])
        self._numbers.start_time[mine] = ENDED


class SharedMemHandle(NamedTuple):
    """Allows another process to write to a buffer; it is small and can be pickled."""

    name: str  # the name of the shared memory block
    cfg: ReplayConfig
    num_envs: int
    spec: Transition

    def attach(self) -> SharedMemWriter:
        """Returns a writer that claims each environment when it first adds a step of it.

        Raises:
          ReplayClosedError: the owner has closed the buffer or has ended.
        """
        try:
            block = Block.attach(self.name)
        except FileNotFoundError:
            raise ReplayClosedError(
                f"{NAME}.attach: the buffer must exist; {self.name} was closed, or its owner ended."
            ) from None
        shared = SharedSteps(self.cfg, self.num_envs, self.spec, block)
        return SharedMemWriter(self.cfg, self.num_envs, shared, NAME)

    def writer(self, rank: int, num_actors: int) -> SharedMemWriter:
        """Returns the writer of one of ``num_actors`` actors, which share the environments evenly.

        Raises:
          ValueError: the actors cannot share the environments evenly, or another running process
              has that rank.
          ReplayClosedError: the owner has closed the buffer or has ended.
        """
        if self.num_envs % num_actors or not 0 <= rank < num_actors:
            raise ValueError(
                f"{NAME}.writer: rank must be below num_actors, which must divide the "
                f"{self.num_envs} environments; got rank {rank} of {num_actors}."
            )
        count = self.num_envs // num_actors
        writer = self.attach()
        writer.claim(np.arange(rank * count, (rank + 1) * count))
        return writer
