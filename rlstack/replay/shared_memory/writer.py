"""The writer's side of a shared replay buffer."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import numpy as np

from rlstack.replay.backoff import Backoff
from rlstack.replay.base import ReplayClosedError, ReplayConfig
from rlstack.replay.clock import EnvClock
from rlstack.replay.shared_memory.block import birth
from rlstack.replay.shared_memory.room import Ids, Room
from rlstack.replay.shared_memory.steps import (
    CLOSED,
    ENDED,
    NEWS,
    OWNER_BIRTH,
    OWNER_PID,
    SharedSteps,
    fence,
)
from rlstack.types import StepType, Transition

_LAST = int(StepType.LAST)
_HANDOVER = 2.0  # seconds that a writer waits for the one before it to end
_CHECK_PERIOD = 1.0  # seconds between two looks at whether the owner lives


class SharedMemWriter:
    """Adds steps of some environments to a `SharedMemReplayBuffer` of another process.

    One thread's: make one for each thread that writes, for environments of its own. It takes an
    environment at its first step, unless ``claim`` did before; a writer that ended, in whatever
    way, is succeeded by the next that takes the environment, whose steps begin with a gap.
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
        """Begins to write; made by a handle.

        Args:
          cfg, num_envs, shared: of the buffer.
          where: its name, for messages.
          resumes: whether the first steps of environments that nobody has written since the
            buffer was made or loaded follow on what was loaded.
        """
        self._cfg, self._num_envs, self._where = cfg, num_envs, where
        self._shared, self._numbers = shared, shared.counters
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._room = Room(cfg, num_envs, shared.counters, where)
        self._ids = EnvClock(num_envs)  # for its check of ids
        self._steps = np.zeros(num_envs, np.int64)  # as far as they are this writer's
        self.mine = np.zeros(num_envs, bool)  # the environments it has taken
        self._all_mine = False
        self._in_step: slice | None = None  # environments that are at the same step,
        self._step = 0  # this one
        self._last_gap = int(shared.counters.unbroken.max())  # no item from here on is broken
        self._resumes = resumes
        self._me = (os.getpid(), birth(os.getpid()), secrets.randbits(62))
        self._next_check = 0.0
        self._closed = False

    def claim(self, env_ids: np.ndarray) -> None:
        """Takes environments over from whoever wrote them before.

        Raises:
          ValueError: another process that lives is writing one of them.
        """
        numbers = self._numbers
        backoff = Backoff(_HANDOVER)  # for one that was killed just now
        for env in env_ids.tolist():
            pid = int(numbers.pid[env])
            while pid not in (0, self._me[0]) and birth(pid) == numbers.birth[env]:
                if not backoff.sleep():
                    raise ValueError(
                        f"{self._where}.add: environment {env} must have one writer; got a second "
                        f"one beside process {pid}. Give every actor a rank of its own."
                    )
        follows_on = self._resumes & (numbers.pid[env_ids] == 0)
        numbers.pid[env_ids], numbers.birth[env_ids], numbers.token[env_ids] = self._me
        numbers.waiting[env_ids] = 0
        self._steps[env_ids] = numbers.steps[env_ids]
        self.mine[env_ids] = True
        self._all_mine = bool(self.mine.all())
        self._break(env_ids[~follows_on])

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; waits while there is no room."""
        self._check_open("add")
        ids, leaves = self.prepare(env_ids, transition)
        if self.obstacle(ids):
            self.wait(lambda: self.obstacle(ids), timeout)
        self.write(ids, leaves)

    def prepare(self, env_ids: np.ndarray | None, transition: Transition) -> tuple[Ids, list]:
        """Checks ids and leaves, and takes environments that are new; returns both."""
        ids = self._checked(env_ids, "add")
        count = ids.stop - ids.start if isinstance(ids, slice) else len(ids)
        leaves = self._shared.ring.leaves(transition, count)
        self._claim_new(ids)
        return ids, leaves

    def _checked(self, env_ids: np.ndarray | None, where: str) -> Ids:
        """Returns ids as a slice if they are neighbours in order, else checked one by one."""
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

    def obstacle(self, ids: Ids) -> str:
        """Returns why the next step of these environments may not be added now, or nothing."""
        step = self._common_step(ids)
        return self._room.obstacle(ids, self._steps[ids] if step is None else step)

    def _common_step(self, ids: Ids) -> int | None:
        """Returns the step at which neighbouring environments are, None if they are apart."""
        if not isinstance(ids, slice):
            return None
        if self._in_step == ids:
            return self._step
        steps = self._steps[ids]
        if not len(steps) or np.count_nonzero(steps == steps[0]) < len(steps):
            return None
        self._in_step, self._step = ids, int(steps[0])
        return self._step

    def wait(self, obstacle: Callable[[], str], timeout: float | None) -> None:
        """Waits until there is no obstacle any more.

        Raises:
          ReplayTimeoutError: there was one all the time.
          ReplayClosedError: the owner has closed the buffer, or ended.
        """
        numbers, mine = self._numbers, np.flatnonzero(self.mine)
        backoff = Backoff(self._cfg.timeout_seconds if timeout is None else timeout)
        try:
            while True:
                news = int(numbers.head[NEWS])  # what the look below knows of, at least
                fence()
                found = obstacle()
                if not found:
                    return
                numbers.waiting[mine] = 1 + news
                if not backoff.sleep():
                    raise self._room.timed_out(found)
                self._check_open("add")
        finally:
            numbers.waiting[mine] = 0
            numbers.waited[mine[0]] += int(backoff.seconds * 1e6)

    def write(self, ids: Ids, leaves: list) -> None:
        """Publishes one step of each of these environments, in the order that readers rely on."""
        shared, numbers = self._shared, self._numbers
        step = self._common_step(ids)
        if step is not None:
            assert isinstance(ids, slice)
            numbers.reserved[ids] = step + 1
            fence()
            shared.ring.write_columns(step, ids, leaves)
            self._mark_all(ids, step)
            fence()
            numbers.steps[ids] = self._steps[ids] = self._step = step + 1
            return
        self._in_step = None
        envs, steps = self._ids.envs[ids], self._steps[ids]
        numbers.reserved[ids] = steps + 1
        fence()
        shared.ring.write(steps, envs, leaves)
        self._mark(envs, steps)
        fence()
        numbers.steps[ids] = self._steps[ids] = steps + 1

    def _mark_all(self, ids: slice, step: int) -> None:
        """Marks a step if it ends whole items; an old mark is no harm, it names an older step."""
        start = step - self._length
        if start < 0 or start % self._period:
            return
        if start < self._last_gap:
            self._mark(self._ids.envs[ids], self._steps[ids])
            return
        ring = self._shared.ring
        marks = self._shared.marks[step % ring.rows, ids]
        if self._cfg.starts == "not_last":
            first = ring.step_type[(start + self._cfg.context) % ring.rows, ids]
            np.multiply(first != _LAST, step + 1, out=marks)
        else:
            marks[:] = step + 1

    def _mark(self, envs: np.ndarray, steps: np.ndarray) -> None:
        """Marks those of some steps that end a whole item."""
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
        """Does nothing: what was added is there."""

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step begins afresh."""
        self._check_open("gap")
        ids = self._checked(env_ids, "gap")
        self._claim_new(ids)
        self._break(self._ids.envs[ids])

    def _break(self, env_ids: np.ndarray) -> None:
        """Puts the clocks forward to where an item can begin."""
        numbers = self._numbers
        after = -(-self._steps[env_ids] // self._period) * self._period
        self._in_step = None
        self._last_gap = max(self._last_gap, int(after.max(initial=0)))
        numbers.unbroken[env_ids] = after
        # It may be ahead: of a step that a writer was killed in, whose row is spoilt.
        numbers.reserved[env_ids] = np.maximum(numbers.reserved[env_ids], after)
        fence()
        numbers.steps[env_ids] = after
        self._steps[env_ids] = after

    def _check_open(self, where: str) -> None:
        """Raises if the buffer is closed or its owner has ended, or the environments were taken."""
        numbers = self._numbers
        if self._closed or numbers.head[CLOSED]:
            raise ReplayClosedError(f"{self._where}.{where}: the buffer is closed.")
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_PERIOD
        if birth(int(numbers.head[OWNER_PID])) != numbers.head[OWNER_BIRTH]:
            raise ReplayClosedError(f"{self._where}.{where}: the process that owned it has ended.")
        taken = self.mine & (numbers.token != self._me[2])
        if taken.any():
            raise ReplayClosedError(
                f"{self._where}.{where}: environments {np.flatnonzero(taken).tolist()!r:.100} "
                "have another writer now."
            )

    def close(self) -> None:
        """Gives the environments back; what was added stays."""
        if self._closed:
            return
        self._closed = True
        mine = self.mine & (self._numbers.token == self._me[2])
        self._numbers.birth[mine] = ENDED
