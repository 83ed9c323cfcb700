"""The writer's side of a shared replay buffer."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import numpy as np

from rlstack.replay.backoff import Backoff
from rlstack.replay.base import ReplayClosedError, ReplayConfig, ReplayTimeoutError
from rlstack.replay.clock import EnvClock
from rlstack.replay.shm_block import birth
from rlstack.replay.shm_steps import (
    ASKED,
    CLOSED,
    ENDED,
    INSERTS,
    NEWS,
    OWNER_BIRTH,
    OWNER_PID,
    SAMPLES,
    SIZE,
    STARVED,
    SharedSteps,
    fence,
)
from rlstack.replay.sizes import layout
from rlstack.types import StepType, Transition

_LAST = int(StepType.LAST)
_HANDOVER = 2.0  # seconds that a writer waits for the one before it to end
_CHECK_PERIOD = 1.0  # seconds between two looks at whether the owner lives

_Ids = slice | np.ndarray


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
        self._room = layout(cfg, num_envs).items * self._period + self._length
        self._ids = EnvClock(num_envs)  # for its check of ids
        self._steps = np.zeros(num_envs, np.int64)  # as far as they are this writer's
        self.mine = np.zeros(num_envs, bool)  # the environments it has taken
        self._all_mine = False
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

    def prepare(self, env_ids: np.ndarray | None, transition: Transition) -> tuple[_Ids, list]:
        """Checks ids and leaves, and takes environments that are new; returns both."""
        ids = None
        if env_ids is not None:
            ids = self._ids.check_ids(f"{self._where}.add", env_ids)
        count = self._num_envs if ids is None else len(ids)
        leaves = self._shared.ring.leaves(transition, count)
        if not self._all_mine:
            every = self._ids.envs if ids is None else ids
            fresh = every[~self.mine[every]]
            if fresh.size:
                self.claim(fresh)
        return self._as_slice(ids), leaves

    def _as_slice(self, ids: np.ndarray | None) -> _Ids:
        if ids is None:
            return slice(0, self._num_envs)
        if not ids.size:
            return slice(0, 0)
        first = int(ids[0])
        if np.count_nonzero(ids == self._ids.envs[: len(ids)] + first) == len(ids):
            return slice(first, first + len(ids))
        return ids

    def obstacle(self, ids: _Ids) -> str:
        """Returns why the next step of these environments may not be added now, or nothing.

        full: an environment has all the items waiting that fit.
        queue: all environments together have. Less than a batch is never too much, since the
          reader could not make room.
        ahead: the reader has yet to sample what samples_per_insert asks for. With
          ``d = samples_per_insert * (inserts - min_size) - samples`` a batch of B must wait while
          ``d < B - tolerance``, and a writer while ``d > max(tolerance, B - tolerance)``: never
          both. B is what was asked for, if that is more than the config's. A reader that waits for
          another reason (STARVED), such as that all items were sampled often enough and left, is
          given a batch beyond the ratio each time that it looks.
        """
        cfg, numbers = self._cfg, self._numbers
        head, steps = numbers.head, self._steps[ids]
        if cfg.sampler == "fifo":
            if np.count_nonzero(steps >= numbers.released[ids] + self._room):
                return "full"
            starts = steps - self._length
            coming = np.count_nonzero((starts >= 0) & (starts % self._period == 0))
            if coming:
                waiting = self._uncounted() + int(head[SIZE])
                if waiting >= cfg.batch_size and waiting + coming > cfg.max_size:
                    return "queue"
        if cfg.samples_per_insert is not None:
            uncounted, batch = self._uncounted(), max(cfg.batch_size, int(head[ASKED]))
            inserts = uncounted + int(head[INSERTS])
            due = cfg.samples_per_insert * (inserts - cfg.min_size) - int(head[SAMPLES])
            if due > max(cfg.tolerance, batch - cfg.tolerance) and not (
                head[STARVED] and uncounted < batch
            ):
                return "ahead"
        return ""

    def _uncounted(self) -> int:
        """Returns how many items writers have completed that the reader has not counted.

        The reader puts its counts before ``seen``, so that what is read in between is counted
        twice rather than not at all.
        """
        seen, steps = self._numbers.seen, self._numbers.steps
        ended = [np.maximum(0, (n - 1 - self._length) // self._period + 1) for n in (steps, seen)]
        return int((ended[0] - ended[1]).sum())

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
                    raise self._timed_out(found)
                self._check_open("add")
        finally:
            numbers.waiting[mine] = 0
            numbers.waited[mine[0]] += int(backoff.seconds * 1e6)

    def _timed_out(self, obstacle: str) -> ReplayTimeoutError:
        rule = {
            "full": "an environment's items must be fewer than max_size_per_env",
            "queue": f"the items waiting must be fewer than max_size ({self._cfg.max_size})",
            "ahead": "inserts must not be ahead of samples by more than samples_per_insert allows",
        }[obstacle]
        return ReplayTimeoutError(
            f"{self._where}.add: {rule}, for a step to be added; nothing was sampled in time. Is "
            "the learner alive, and fast enough? Raise timeout_seconds, or that limit."
        )

    def write(self, ids: _Ids, leaves: list) -> None:
        """Publishes one step of each of these environments, in the order that readers rely on."""
        shared, numbers = self._shared, self._numbers
        steps = self._steps[ids]
        after = steps + 1
        numbers.reserved[ids] = after
        fence()
        in_step = isinstance(ids, slice) and np.count_nonzero(steps == steps[:1]) == len(steps)
        if in_step and len(steps):
            assert isinstance(ids, slice)
            shared.ring.write_columns(int(steps[0]), ids, leaves)
        else:
            every = self._ids.envs[ids]
            shared.ring.write(steps, every, leaves)
        self._mark(ids, steps)
        fence()
        numbers.steps[ids] = after
        self._steps[ids] = after

    def _mark(self, ids: _Ids, steps: np.ndarray) -> None:
        """Marks the steps that end a whole item."""
        starts = steps - self._length
        due = (starts >= 0) & (starts % self._period == 0)
        if not np.count_nonzero(due):
            return  # an old mark is no harm: it names an older step
        shared, envs = self._shared, self._ids.envs[ids]
        due &= self._numbers.unbroken[ids] <= starts
        if self._cfg.starts == "not_last":
            due &= shared.ring.step_type[starts % shared.ring.rows, envs] != _LAST
        shared.marks[steps % shared.ring.rows, envs] = np.where(due, steps + 1, 0)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step begins afresh."""
        self._check_open("gap")
        ids = None
        if env_ids is not None:
            ids = self._ids.check_ids(f"{self._where}.gap", env_ids)
        every = self._ids.envs if ids is None else ids
        fresh = every[~self.mine[every]]
        if fresh.size:
            self.claim(fresh)
        self._break(every)

    def _break(self, env_ids: np.ndarray) -> None:
        """Puts the clocks forward to where an item can begin."""
        numbers = self._numbers
        after = -(-self._steps[env_ids] // self._period) * self._period
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
