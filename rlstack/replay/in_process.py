"""Replay in the memory of the process that acts and learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from rlstack.replay.base import (
    ReplayClosedError,
    ReplayConfig,
    ReplayTimeoutError,
    Sample,
    as_logs,
)
from rlstack.replay.clock import EnvClock
from rlstack.replay.prioritized import Prioritized
from rlstack.replay.samplers import Fifo, Sampler, Uniform
from rlstack.replay.storage import StepRing, layout
from rlstack.types import Batch, Logs, PyTree, StepType, Transition

_SAMPLERS: dict[str, type[Sampler]] = {"fifo": Fifo, "uniform": Uniform, "prioritized": Prioritized}
_LAST = int(StepType.LAST)  # numpy compares with plain ints much faster than with enums


class InProcessReplay:
    """A ``ReplayBuffer`` for one process; see there for what the methods promise.

    It never waits. Calls from several threads are safe, one after the other; batches that are
    views (fifo, all environments in step) are not guarded against a thread that goes on adding.
    """

    def __init__(
        self, cfg: ReplayConfig, num_envs: int, *, seed: int, spec: Transition | None = None
    ):
        """Makes an empty buffer.

        Args:
          cfg: the table.
          num_envs: environments that write; ids are in ``[0, num_envs)``.
          seed: of the sampler's own random generator.
          spec: shapes and dtypes of one environment's step, as `rlstack.actor.transition_spec`
            gives them; without it they are those of the first step added.
        """
        if num_envs < 1:
            raise ValueError(f"InProcessReplay: num_envs must be at least 1; got {num_envs}.")
        self._cfg, self._num_envs = cfg, num_envs
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._items = layout(cfg, num_envs).items
        self._lock = threading.Lock()
        self._closed = False
        self._clock = EnvClock(num_envs)
        self._ring = StepRing(cfg, num_envs)
        if spec is not None:
            self._ring.allocate(spec)
        self._sampler = _SAMPLERS[cfg.sampler](cfg, self._items * num_envs, seed)
        self._inserts = self._samples = 0
        self._version = -1
        self._checked = (-1, -1)  # version and inserts when stale items were last looked for
        self._lag = np.zeros(1, np.int64)

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments."""
        with self._lock:
            if self._closed:
                self._refuse_closed("add")
            clock = self._clock
            if env_ids is not None:
                env_ids = clock.check_ids("InProcessReplay.add", env_ids)
            if env_ids is None:
                leaves = self._ring.leaves(transition, self._num_envs)
                if clock.together or clock.rejoin():
                    self._add_all(leaves)
                    return
                env_ids = clock.envs
            else:
                leaves = self._ring.leaves(transition, len(env_ids))
                clock.part()
            self._add_some(env_ids, leaves)

    def _add_all(self, leaves: list) -> None:
        """Adds a step of every environment, all at the same step."""
        clock = self._clock
        self._ring.write_all(clock.step, leaves)
        start = clock.step - self._length
        clock.step += 1
        if start < 0 or start % self._period:
            return
        valid = None if start >= clock.last_gap else clock.unbroken <= start
        if self._cfg.starts == "not_last":
            inside = self._ring.step_type[start % self._ring.rows] != _LAST
            valid = inside if valid is None else valid & inside
        index = start // self._period
        cell = index % self._items * self._num_envs
        cells = slice(cell, cell + self._num_envs)
        self._inserts += self._sampler.insert(cells, clock.envs + index * self._num_envs, valid)

    def _add_some(self, env_ids: np.ndarray, leaves: list) -> None:
        """Adds a step of some environments, each at its own step."""
        steps = self._clock.steps[env_ids]
        self._ring.write(steps, env_ids, leaves)
        self._clock.steps[env_ids] = steps + 1
        self._complete(steps - self._length, env_ids)

    def _complete(self, starts: np.ndarray, env_ids: np.ndarray) -> None:
        """Inserts the items with these starts, where there are any."""
        due = starts >= 0
        if self._period > 1:
            due &= starts % self._period == 0
        count = np.count_nonzero(due)
        if not count:
            return
        if count < len(due):
            starts, env_ids = starts[due], env_ids[due]
        valid = self._clock.unbroken[env_ids] <= starts
        if self._cfg.starts == "not_last":
            valid &= self._ring.step_type[starts % self._ring.rows, env_ids] != _LAST
        keys = starts // self._period * self._num_envs + env_ids
        self._inserts += self._sampler.insert(keys % len(self._sampler.key_at), keys, valid)

    def _refuse_closed(self, where: str) -> None:
        raise ReplayClosedError(f"InProcessReplay.{where}: the buffer is closed.")

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step begins afresh."""
        with self._lock:
            if self._closed:
                self._refuse_closed("gap")
            clock, ids = self._clock, None
            if env_ids is not None:
                ids = clock.check_ids("InProcessReplay.gap", env_ids)
            ids = clock.envs if ids is None else ids
            clock.part()
            before, after = clock.interrupt(ids, self._period)
            # At most one item would have been completed in the steps jumped over. It is none, but
            # its turn ends the stay of the oldest item.
            skipped = before + (self._length - before) % self._period
            self._complete(np.where(skipped < after, skipped - self._length, -1), ids)
            clock.rejoin()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        with self._lock:
            return not self._obstacle(self._cfg.batch_size if batch_size is None else batch_size)

    def _obstacle(self, batch_size: int) -> str:
        """Returns the name of what stands in the way of a sample, or nothing."""
        cfg = self._cfg
        if self._closed:
            return "closed"
        if self._inserts < cfg.min_size:
            return "min_size"
        if cfg.max_staleness is not None:
            self._drop_stale(cfg.max_staleness)
        if not self._sampler.ready(batch_size):
            return "items"
        if cfg.samples_per_insert is not None:
            allowed = cfg.samples_per_insert * (self._inserts - cfg.min_size) + cfg.tolerance
            if self._samples + batch_size > allowed:
                return "samples_per_insert"
        return ""

    def _explain(self, obstacle: str, batch_size: int) -> Exception:
        """Returns the error for an obstacle."""
        if obstacle == "closed":
            return ReplayClosedError("InProcessReplay.sample: the buffer is closed.")
        rule = {
            "min_size": f"{self._cfg.min_size} items must have been inserted (min_size); got "
            f"{self._inserts}. Add more, or lower min_size.",
            "items": f"batch_size ({batch_size}) must be covered by the items held; got "
            f"{self._sampler.size}. Add more, or lower batch_size.",
            "samples_per_insert": f"{batch_size} more than the {self._samples} items sampled so "
            f"far would exceed samples_per_insert for {self._inserts} inserts. Add more, or raise "
            "samples_per_insert or its tolerance.",
        }[obstacle]
        return ReplayTimeoutError(f"InProcessReplay.sample: {rule} Ask can_sample first.")

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items, or raises if it cannot now."""
        size = self._cfg.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"InProcessReplay.sample: batch_size must be at least 1; got {size}.")
        with self._lock:
            obstacle = self._obstacle(size)
            if obstacle:
                raise self._explain(obstacle, size)
            keys, weights = self._sampler.draw(size)
            starts, env_ids = self._locate(keys)
            self._samples += size
            self._lag = self._newest_version() - self._versions(starts, env_ids)
            if self._cfg.sampler == "fifo" and self._side_by_side(keys):
                trajectory = self._ring.view(int(starts[0]), int(env_ids[0]), size)
            else:
                trajectory = self._ring.gather(starts, env_ids)
            return Sample(Batch(trajectory, weights), keys.astype(np.uint64))

    def _side_by_side(self, keys: np.ndarray) -> bool:
        """Whether these items lie in neighbouring columns of the same rows."""
        count, first = len(keys), int(keys[0])
        if first % self._num_envs + count > self._num_envs:
            return False
        return np.count_nonzero(keys == self._clock.envs[:count] + first) == count

    def _locate(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns first steps and environments of items."""
        index, env_ids = np.divmod(keys, self._num_envs)
        return index * self._period, env_ids

    def _versions(self, starts: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the params version that made each item, [B] int64.

        An item's first step may be the last of the item before, taken before the learner could
        answer that one. The second step is the first that is the item's own.
        """
        return self._ring.params_version[(starts + 1) % self._ring.rows, env_ids].astype(np.int64)

    def _newest_version(self) -> int:
        """Returns the newest version told or seen."""
        rows = self._clock.last_steps() % self._ring.rows
        newest = int(self._ring.params_version[rows, self._clock.envs].max())
        self._version = max(self._version, newest)
        return self._version

    def _drop_stale(self, limit: int) -> None:
        """Drops waiting items that lie too far behind the newest version."""
        sampler = self._sampler
        if not sampler.size or (self._newest_version(), self._inserts) == self._checked:
            return
        self._checked = (self._version, self._inserts)
        assert isinstance(sampler, Fifo)
        keys = sampler.waiting()
        keys = keys[self._version - self._versions(*self._locate(keys)) > limit]
        sampler.remove(keys % len(sampler.key_at))
        sampler.stale += len(keys)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; items that left are ignored."""
        keys, priorities = np.asarray(keys), np.asarray(priorities, np.float64)
        if keys.ndim != 1 or keys.shape != priorities.shape or keys.dtype.kind not in "iu":
            raise ValueError(
                "InProcessReplay.update_priorities: keys and priorities must both be [B], keys "
                f"ints; got {keys.dtype}{keys.shape} and {priorities.shape}."
            )
        if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
            raise ValueError(
                "InProcessReplay.update_priorities: priorities must be finite and at least 0; got "
                f"{priorities.min()} to {priorities.max()}. Has the learner diverged?"
            )
        with self._lock:
            if self._closed:
                self._refuse_closed("update_priorities")
            self._sampler.update(keys.astype(np.int64), priorities)

    def set_params_version(self, version: int) -> None:
        """Tells the version of the learner's params."""
        with self._lock:
            self._version = max(self._version, int(version))

    def make_dataset(self) -> Iterator[Sample]:
        """Yields samples while ``can_sample``."""
        while self.can_sample():
            yield self.sample()

    def stats(self) -> Logs:
        """Returns sizes, counters and the lag of the last batch's items."""
        return as_logs(
            size=self._sampler.size,
            inserts=self._inserts,
            samples=self._samples,
            dropped=self._sampler.dropped,
            dropped_stale=self._sampler.stale,
            lag_min=self._lag.min(),
            lag_mean=self._lag.mean(),
            lag_max=self._lag.max(),
        )

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays (copies)."""
        with self._lock:
            if self._closed:
                self._refuse_closed("save")
            counters = [self._inserts, self._samples, self._version, *self._checked]
            return {
                "steps": self._ring.save(int(self._clock.last_steps().max()) + 1),
                "clock": self._clock.save(),
                "sampler": self._sampler.save(),
                "counters": np.array(counters, np.int64),
            }

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned."""
        with self._lock:
            if self._closed:
                self._refuse_closed("load")
            self._sampler.load(tree["sampler"])
            self._ring.load(tree["steps"])
            self._clock.load(tree["clock"])
            self._inserts, self._samples, self._version, *checked = map(int, tree["counters"])
            self._checked = (checked[0], checked[1])

    def close(self) -> None:
        """Frees the storage; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._ring = StepRing(self._cfg, self._num_envs)
