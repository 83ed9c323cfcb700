"""Replay in the memory of the process that acts and learns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from rlstack.replay.base import ReplayClosedError, ReplayConfig, Sample, as_logs
from rlstack.replay.samplers import Fifo, Sampler, Uniform
from rlstack.replay.storage import StepRing, layout
from rlstack.types import Batch, Logs, PyTree, StepType, Transition

_SAMPLERS: dict[str, type[Sampler]] = {"fifo": Fifo, "uniform": Uniform}


class InProcessReplay:
    """A ``ReplayBuffer`` for one process; see there for what the methods promise.

    It never waits. Calls from several threads are safe, one after the other; batches that are
    views (fifo, all environments in step) are not guarded against a thread that goes on adding.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, *, seed: int):
        """Makes an empty buffer; memory is taken at the first ``add``.

        Args:
          cfg: the table.
          num_envs: environments that write; ids are in ``[0, num_envs)``.
          seed: of the sampler's own random generator.
        """
        if num_envs < 1:
            raise ValueError(f"InProcessReplay: num_envs must be at least 1; got {num_envs}.")
        self._cfg, self._num_envs = cfg, num_envs
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._items = layout(cfg, num_envs).items
        self._envs = np.arange(num_envs)
        self._mark = np.zeros(num_envs, np.int64)
        self._lock = threading.Lock()
        self._closed = False
        self._rng = np.random.default_rng(seed)
        self._ring = StepRing(cfg, num_envs)
        self._sampler = _SAMPLERS[cfg.sampler](cfg, self._items * num_envs)
        # While all environments are at the same step, `_step` says which and `_steps` is idle.
        self._together, self._step = True, 0
        self._steps = np.zeros(num_envs, np.int64)
        self._unbroken = np.zeros(num_envs, np.int64)  # the step after the last gap
        self._last_gap = 0  # the largest of these
        self._inserts = self._samples = 0
        self._version = self._checked_version = -1
        self._lag = np.zeros(1, np.int64)

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        """Appends one step of each of some environments."""
        with self._lock:
            self._check_open("add")
            if env_ids is not None:
                env_ids = self._check_ids("add", env_ids)
            if env_ids is None:
                leaves = self._ring.leaves(transition, self._num_envs)
                if self._together or self._rejoin():
                    self._add_all(leaves)
                    return
                env_ids = self._envs
            else:
                leaves = self._ring.leaves(transition, len(env_ids))
                self._part()
            self._add_some(env_ids, leaves)

    def _add_all(self, leaves: list) -> None:
        """Adds a step of every environment, all at the same step."""
        self._ring.write_all(self._step, leaves)
        start = self._step - self._length
        self._step += 1
        if start < 0 or start % self._period:
            return
        valid = None if start >= self._last_gap else self._unbroken <= start
        if self._cfg.starts == "not_last":
            inside = self._ring.step_type[start % self._ring.rows] != StepType.LAST
            valid = inside if valid is None else valid & inside
        index = start // self._period
        cell = index % self._items * self._num_envs
        cells = slice(cell, cell + self._num_envs)
        self._inserts += self._sampler.insert(cells, self._envs + index * self._num_envs, valid)

    def _add_some(self, env_ids: np.ndarray, leaves: list) -> None:
        """Adds a step of some environments, each at its own step."""
        steps = self._steps[env_ids]
        self._ring.write(steps, env_ids, leaves)
        self._steps[env_ids] = steps + 1
        self._complete(steps - self._length, env_ids)

    def _complete(self, starts: np.ndarray, env_ids: np.ndarray) -> None:
        """Inserts the items with these starts, where there are any."""
        here = np.flatnonzero((starts >= 0) & (starts % self._period == 0))
        if not here.size:
            return
        starts, env_ids = starts[here], env_ids[here]
        valid = self._unbroken[env_ids] <= starts
        if self._cfg.starts == "not_last":
            valid &= self._ring.step_type[starts % self._ring.rows, env_ids] != StepType.LAST
        keys = starts // self._period * self._num_envs + env_ids
        self._inserts += self._sampler.insert(keys % len(self._sampler.key_at), keys, valid)

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"InProcessReplay.{where}: the buffer is closed.")

    def _check_ids(self, where: str, env_ids: np.ndarray) -> np.ndarray | None:
        """Returns distinct ids, or None if they are all, in order."""
        ids = np.asarray(env_ids)
        if ids.ndim == 1 and ids.dtype.kind in "iu":
            count = len(ids)
            if count == self._num_envs and (ids == self._envs).all():
                return None
            if count == 0 or (ids.min() >= 0 and ids.max() < self._num_envs):
                order = self._envs[:count]
                if count <= self._num_envs:
                    self._mark[ids] = order
                    if (self._mark[ids] == order).all():
                        return ids
        raise ValueError(
            f"InProcessReplay.{where}: env_ids must be distinct ints in 0..{self._num_envs - 1}, "
            f"one axis; got {ids.dtype} {ids.tolist()!r:.200}. Pass None for all environments."
        )

    def _part(self) -> None:
        """Goes over to counting each environment's steps apart."""
        if self._together:
            self._steps[:] = self._step
            self._together = False

    def _rejoin(self) -> bool:
        """Goes back to one count if all environments are at the same step again."""
        if (self._steps == self._steps[0]).all():
            self._together, self._step = True, int(self._steps[0])
        return self._together

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step begins afresh."""
        with self._lock:
            self._check_open("gap")
            ids = None if env_ids is None else self._check_ids("gap", env_ids)
            ids = self._envs if ids is None else ids
            self._part()
            steps = self._steps[ids]
            # Items start at multiples of the period, so that is where the next step goes.
            after = -(-steps // self._period) * self._period
            self._unbroken[ids] = self._steps[ids] = after
            if ids.size:
                self._last_gap = max(self._last_gap, int(after.max()))
            for ahead in range(self._period - 1):  # cells of the items the jump skips
                self._complete(
                    np.where(steps + ahead < after, steps + ahead - self._length, -1), ids
                )
            self._rejoin()

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
        return ValueError(f"InProcessReplay.sample: {rule} Ask can_sample first.")

    def sample(self, batch_size: int | None = None) -> Sample:
        """Draws a batch of items, or raises if it cannot now."""
        size = self._cfg.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"InProcessReplay.sample: batch_size must be at least 1; got {size}.")
        with self._lock:
            obstacle = self._obstacle(size)
            if obstacle:
                raise self._explain(obstacle, size)
            keys, weights = self._sampler.draw(size, self._rng)
            starts, env_ids = self._locate(keys)
            self._samples += size
            self._lag = self._newest_version() - self._versions(starts, env_ids)
            first = int(env_ids[0])
            neighbours = first + size <= self._num_envs and (keys == keys[0] + self._envs[:size])
            if self._cfg.sampler == "fifo" and np.all(neighbours):
                trajectory = self._ring.view(int(starts[0]), first, size)
            else:
                trajectory = self._ring.gather(starts, env_ids)
            return Sample(Batch(trajectory, weights), keys.astype(np.uint64))

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
        steps = self._step if self._together else self._steps
        last = self._ring.params_version[(steps - 1) % self._ring.rows, self._envs]
        self._version = max(self._version, int(last.max()))
        return self._version

    def _drop_stale(self, limit: int) -> None:
        """Drops waiting items that lie too far behind the newest version."""
        sampler = self._sampler
        assert isinstance(sampler, Fifo)
        if not sampler.size or self._newest_version() == self._checked_version:
            return
        self._checked_version = self._version
        keys = sampler.waiting()
        keys = keys[self._version - self._versions(*self._locate(keys)) > limit]
        sampler.discard(keys)
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
            self._check_open("update_priorities")
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
            self._check_open("save")
            self._part()
            counters = [self._inserts, self._samples, self._version, self._checked_version]
            tree = {
                "steps": self._ring.save(),
                "sampler": self._sampler.save(),
                "step_counts": self._steps.copy(),
                "unbroken": self._unbroken.copy(),
                "counters": np.array(counters, np.int64),
                "rng": _rng_words(self._rng),
            }
            self._rejoin()
            return tree

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned."""
        with self._lock:
            self._check_open("load")
            self._ring.load(tree["steps"])
            self._sampler.load(tree["sampler"])
            self._steps[:], self._unbroken[:] = tree["step_counts"], tree["unbroken"]
            self._last_gap, self._together = int(self._unbroken.max()), False
            self._rejoin()
            counters = [int(n) for n in tree["counters"]]
            self._inserts, self._samples, self._version, self._checked_version = counters
            _set_rng(self._rng, tree["rng"])

    def close(self) -> None:
        """Frees the storage; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._ring = StepRing(self._cfg, self._num_envs)


_MASK = (1 << 64) - 1


def _rng_words(rng: np.random.Generator) -> np.ndarray:
    """Returns a PCG64 generator's state as words, [6] uint64."""
    outer = rng.bit_generator.state
    state, inc = outer["state"]["state"], outer["state"]["inc"]
    words = [state >> 64, state & _MASK, inc >> 64, inc & _MASK]
    return np.array([*words, outer["has_uint32"], outer["uinteger"]], np.uint64)


def _set_rng(rng: np.random.Generator, words: np.ndarray) -> None:
    """Puts back what ``_rng_words`` returned."""
    high, low, inc_high, inc_low, has, value = (int(word) for word in words)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": has,
        "uinteger": value,
    }
