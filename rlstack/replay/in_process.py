"""Replay in memory, for a single process that acts and learns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayClosedError, Sample
from rlstack.replay.storage import StepRing
from rlstack.replay.table import ItemTable
from rlstack.types import Logs, PyTree, Transition


class InProcessReplay:
    """A ``ReplayBuffer`` for one process; `ReplayBuffer` documents the methods.

    It never waits. Several threads may call it; it serves one at a time. Some batches are views
    (fifo, if all environments are at the same step). A thread that continues to add may overwrite
    such a batch.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        *,
        seed: int,
        spec: Transition | None = None,
        num_actors: int = 1,
    ):
        """Makes an empty buffer.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments; ids are in ``[0, num_envs)``.
          seed: seed of the sampler's random generator.
          spec: shapes and dtypes of one environment's step, from
              `rlstack.acting.actor.transition_spec`. Default: those of the first added step.
          num_actors: number of actors, needed for rounds. Actors share the environments evenly and
              in order.

        Raises:
          ValueError: the sizes contradict each other, or there is not enough memory.
        """
        if num_envs < 1:
            raise ValueError(f"InProcessReplay: num_envs must be at least 1; got {num_envs}.")
        self._cfg, self._num_envs = cfg, num_envs
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._lock = threading.Lock()
        self._closed = False
        self._ring = StepRing(cfg, num_envs)
        if spec is not None:
            self._ring.allocate(spec)
        self._table = ItemTable(
            "InProcessReplay", cfg, num_envs, self._ring, seed=seed, num_actors=num_actors
        )
        self._counter = self._table.counter

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments."""
        with self._lock:
            if self._closed:
                self._refuse_closed("add")
            counter = self._counter
            if env_ids is not None:
                env_ids = counter.check_ids("InProcessReplay.add", env_ids)
            if env_ids is None:
                leaves = self._ring.leaves(transition, self._num_envs)
                if counter.together or counter.rejoin():
                    self._add_all(leaves)
                    return
                env_ids = counter.envs
            else:
                leaves = self._ring.leaves(transition, len(env_ids))
                counter.separate()
            self._add_some(env_ids, leaves)

    def _add_all(self, leaves: list[np.ndarray]) -> None:
        """Adds a step of every environment, all at the same step."""
        counter = self._counter
        self._ring.write_all(counter.step, leaves)
        start = counter.step - self._length
        counter.step += 1
        if start >= 0 and not start % self._period:
            self._table.complete_all(start)

    def _add_some(self, env_ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Adds a step of some environments, each at its own step."""
        steps = self._counter.steps[env_ids]
        self._ring.write(steps, env_ids, leaves)
        self._counter.steps[env_ids] = steps + 1
        self._table.complete(steps - self._length, env_ids)

    def _refuse_closed(self, where: str) -> None:
        raise ReplayClosedError(f"InProcessReplay.{where}: the buffer is closed.")

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step starts new ones."""
        with self._lock:
            if self._closed:
                self._refuse_closed("gap")
            ids = None
            if env_ids is not None:
                ids = self._counter.check_ids("InProcessReplay.gap", env_ids)
            self._table.gap(self._counter.envs if ids is None else ids)

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: added steps are available immediately."""

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        size = self._cfg.batch_size if batch_size is None else batch_size
        with self._lock:
            return not self._closed and not self._table.blocking_rule(size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items; raises immediately if a rule blocks it."""
        table = self._table
        size = table.size_of(batch_size)
        with self._lock:
            if self._closed:
                self._refuse_closed("sample")
            rule = table.blocking_rule(size)
            if rule:
                raise table.explain(rule, size)
            keys, relative_probs = table.draw(size)
            starts, env_ids = table.locate(keys)
            if self._cfg.sampler == "fifo" and self._are_adjacent(keys):
                trajectory = self._ring.view(int(starts[0]), int(env_ids[0]), len(keys))
            else:
                trajectory = self._ring.gather(starts, env_ids)
            if table.processing is not None:
                for values, new in table.process(trajectory, starts, env_ids)[0]:
                    values[...] = new
            return table.finish(keys, relative_probs, trajectory)

    def _are_adjacent(self, keys: np.ndarray) -> bool:
        """Whether these items are in adjacent columns of the same rows."""
        count, first = len(keys), int(keys[0])
        if first % self._num_envs + count > self._num_envs:
            return False
        return np.count_nonzero(keys == self._counter.envs[:count] + first) == count

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; ignores items no longer held."""
        with self._lock:
            if self._closed:
                self._refuse_closed("update_priorities")
            self._table.update_priorities(keys, priorities)

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items; ignores items no longer held."""
        with self._lock:
            if self._closed:
                self._refuse_closed("write_back")
            self._table.write_back(keys, updates)

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params."""
        with self._lock:
            self._table.version = max(self._table.version, int(version))

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples while ``can_sample``, or until ``stop`` returns True."""
        while self.can_sample() and not (stop is not None and stop()):
            yield self.sample()

    def stats(self) -> Logs:
        """Returns sizes, counters and the lag of the last batch's items."""
        return self._table.stats()

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays (copies)."""
        with self._lock:
            if self._closed:
                self._refuse_closed("save")
            return self._table.save(self._ring.save(int(self._counter.last_steps().max()) + 1))

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        with self._lock:
            if self._closed:
                self._refuse_closed("load")
            self._table.load(tree)
            self._ring.load(tree["steps"], self._counter.last_steps() + 1)

    def close(self) -> None:
        """Frees the storage; a second call does nothing."""
        with self._lock:
            self._closed = True
            self._ring = self._table.ring = StepRing(self._cfg, self._num_envs)
