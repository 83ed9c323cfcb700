"""The table of a replay buffer: it holds the items and decides when they may be sampled.

All backends on one machine use it. They differ in how steps are written to the ring and in which
side may wait. The table has no lock; its buffer allows only one thread at a time.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import (
    Counts,
    ReplayTimeoutError,
    Sample,
    as_logs,
    checked_priorities,
    exceeds_samples_per_insert,
    explain_rule,
)
from rlstack.replay.memory import ring_shape
from rlstack.replay.rounds import Round, Rounds
from rlstack.replay.samplers import Fifo, Sampler, Uniform
from rlstack.replay.step_counter import StepCounter
from rlstack.replay.storage import StepRing
from rlstack.types import Batch, Logs, PyTree, StepType, Trajectory

if TYPE_CHECKING:  # imported by tables with an item processor
    from rlstack.replay.episodes import Change, Processing


class ItemTable:
    """Items over a ring of steps: sampler, rate limit, staleness, rounds, counters.

    Attributes:
      ring: the ring of steps.
      counter: the number of steps of each environment that the table has seen.
      sampler: the sampler, which holds the items.
      processing: changes items that were drawn; None without an item processor.
      inserts, samples: items inserted and sampled, ever.
      version: newest params version that was set or seen.
    """

    def __init__(
        self,
        where: str,
        cfg: ReplayConfig,
        num_envs: int,
        ring: StepRing,
        *,
        seed: int,
        num_actors: int = 1,
        drops: bool = True,
    ):
        """Makes an empty table.

        Args:
          where: the buffer's name, for messages.
          cfg: the rules of the table.
          num_envs: number of environments.
          ring: the ring that holds the steps.
          seed: seed of the sampler's random generator.
          num_actors: number of actors, needed for rounds. Actors share the environments evenly.
          drops: whether a fifo above max_size drops its oldest items.
        """
        self._where, self._cfg, self._num_envs = where, cfg, num_envs
        self._length, self._period = cfg.unroll_length, cfg.step_period
        self._context = cfg.context
        # To compare with an array takes half the time of comparing with a number.
        self._all_last = np.full(num_envs, StepType.LAST, np.int32)
        self.items = ring_shape(cfg, num_envs).items
        self.ring, self.counter = ring, StepCounter(num_envs)
        cells = self.items * num_envs
        kept = cfg if drops else dataclasses.replace(cfg, max_size=max(cells, cfg.max_size))
        self.sampler: Sampler
        if cfg.sampler_factory:
            from rlstack.replay.custom import CustomSampler

            self.sampler = CustomSampler(cfg, cells, seed, lambda: self.ring, self.counter)
        elif cfg.sampler == "prioritized":
            from rlstack.replay.prioritized import Prioritized

            self.sampler = Prioritized(kept, cells, seed)
        else:
            self.sampler = (Fifo if cfg.sampler == "fifo" else Uniform)(kept, cells, seed)
        self.processing: Processing | None = None
        if cfg.item_processor:
            from rlstack.replay.episodes import Processing

            self.processing = Processing(cfg, num_envs)
        self.inserts = self.samples = 0
        self.version = -1
        self._checked = (-1, -1)  # version and inserts at the last search for stale items
        self._lag = np.zeros(1, np.int64)
        rounds = Rounds(cfg.min_actors, cfg.grace_seconds, num_actors, num_envs)
        self._rounds = rounds if cfg.min_actors else None
        self._round: Round | None = None
        self._refused: tuple[int, int, int] | None = None  # state when no round was ready
        self._full = False  # whether the next round takes whatever there is
        self._late = self._round_actors = 0

    # Inserting.

    def complete_all(self, start: int) -> None:
        """Inserts the items of all environments that begin at step ``start``."""
        counter = self.counter
        valid = None if start >= counter.last_gap else counter.unbroken <= start
        if self._cfg.starts == "not_last":
            inside = self.ring.step_type[(start + self._context) % self.ring.rows] != self._all_last
            valid = inside if valid is None else valid & inside
        num_envs, index = self._num_envs, start // self._period
        cell, key = index % self.items * num_envs, index * num_envs
        keys = np.arange(key, key + num_envs)
        self.inserts += self.sampler.insert(slice(cell, cell + num_envs), keys, valid)

    def complete(self, starts: np.ndarray, env_ids: np.ndarray) -> None:
        """Inserts the items that start at these steps, if items may start there."""
        due = starts >= 0
        if self._period > 1:
            due &= starts % self._period == 0
        count = np.count_nonzero(due)
        if not count:
            return
        if count < len(due):
            starts, env_ids = starts[due], env_ids[due]
        valid = self.counter.unbroken[env_ids] <= starts
        if self._cfg.starts == "not_last":
            at = (starts + self._context) % self.ring.rows
            valid &= self.ring.step_type[at, env_ids] != self._all_last[: len(env_ids)]
        keys = starts // self._period * self._num_envs + env_ids
        self.insert(keys, valid)

    def insert(self, keys: np.ndarray, valid: np.ndarray | None) -> None:
        """Inserts the valid ones of these items by key; no two items may share a cell."""
        self.inserts += self.sampler.insert(keys % len(self.sampler.key_at), keys, valid)

    def gap(self, env_ids: np.ndarray) -> None:
        """Breaks the streams of some environments, and increases their step counts."""
        counter = self.counter
        counter.separate()
        before, after = counter.interrupt(env_ids, self._period)
        # At most one item would have ended in the skipped steps. It is broken and is not inserted,
        # but it still replaces the oldest item.
        skipped = before + (self._length - before) % self._period
        self.complete(np.where(skipped < after, skipped - self._length, -1), env_ids)
        counter.rejoin()

    # Sampling.

    def size_of(self, batch_size: int | None) -> int:
        """Returns the batch size to use.

        Raises:
          ValueError: the batch size is less than 1.
        """
        size = self._cfg.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"{self._where}.sample: batch_size must be at least 1; got {size}.")
        return size

    def blocking_rule(self, batch_size: int) -> str:
        """Returns the name of the rule that blocks a sample now, or ""."""
        cfg = self._cfg
        if self.inserts < cfg.min_size:
            return "min_size"
        if cfg.max_staleness is not None:
            self._drop_stale(cfg.max_staleness)
        if self._rounds is not None:
            self._plan_round(self._rounds)
            if self._round is None:
                return "round"
            batch_size = len(self._round.take)
        elif not self.sampler.ready(batch_size):
            return "items"
        if exceeds_samples_per_insert(cfg, self.inserts, self.samples, batch_size):
            return "samples_per_insert"
        return ""

    def explain(self, rule: str, batch_size: int) -> Exception:
        """Returns the error for a blocking rule."""
        counts = Counts(self.inserts, self.samples, self.sampler.size, self.version)
        rule = explain_rule(self._cfg, rule, batch_size, counts)
        return ReplayTimeoutError(f"{self._where}.sample: {rule} Check can_sample first.")

    def draw(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws items, or the planned round; call it only when no rule blocks.

        Returns:
          Keys [B] int64, and N * P(i), the probability of each relative to uniform sampling, [B].
        """
        planned, self._round = self._round, None
        if planned is None or self._rounds is None:
            return self.sampler.draw(batch_size)
        assert isinstance(self.sampler, Fifo)
        keys = self.sampler.queued()[planned.take]
        self.sampler.take(keys)
        self._rounds.start_over()
        self._full = False
        self._late += planned.late
        self._round_actors = planned.actors
        return keys, np.ones(len(keys), np.float32)

    def num_ready(self, batch_size: int, most: int) -> int:
        """Returns how many batches may be drawn at once; call it only when no rule blocks one."""
        if self._rounds is not None:
            return 1
        count = most
        while count > 1 and self.blocking_rule(count * batch_size):
            count -= 1
        return count

    def draw_batches(self, batch_size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws several batches, at most as many as are ready.

        Returns:
          Keys [count, B] int64, and N * P(i), [count, B].
        """
        if self._rounds is None:
            return self.sampler.draw_batches(batch_size, count)
        keys, relative_probs = self.draw(batch_size)
        return keys[None], relative_probs[None]

    def locate(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first steps and the environments of items."""
        index, env_ids = np.divmod(keys, self._num_envs)
        return index * self._period, env_ids

    def process(
        self, trajectory: Trajectory, starts: np.ndarray, env_ids: np.ndarray
    ) -> tuple[list[Change], np.ndarray]:
        """Calls the item processor; see `rlstack.replay.episodes.Processing.process`."""
        assert self.processing is not None
        where = self.ring, self.counter, trajectory, starts, env_ids
        return self.processing.process(self.sampler.rng, *where)

    def finish(
        self, keys: np.ndarray, relative_probs: np.ndarray, trajectory: Trajectory
    ) -> Sample:
        """Counts a batch that was drawn and gathered, and adds its importance weights.

        Args:
          keys: the keys of the batch's items, [B], or [n, B] for several batches.
          relative_probs: N * P(i) of these items, in the same shape.
          trajectory: the steps of these items, [T+1, B, ...] or [n, T+1, B, ...].
        """
        self.samples += keys.size
        # Consecutive items may share a step, which is then older than the other steps of the second
        # item. So an item's version is read at its second step.
        own = np.asarray(trajectory.params_version[..., self._context + 1, :], np.int64)
        self._lag = self.newest_version() - own
        if keys.ndim == 1:
            weights = self.sampler.weigh(relative_probs)
        else:
            weights = np.stack([self.sampler.weigh(probs) for probs in relative_probs])
        return Sample(Batch(trajectory, weights), keys.astype(np.uint64))

    def newest_version(self) -> int:
        """Returns the newest params version that was set or seen."""
        rows = self.counter.last_steps() % self.ring.rows
        newest = int(self.ring.params_version[rows, self.counter.envs].max())
        self.version = max(self.version, newest)
        return self.version

    def _versions(self, starts: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the params version of each item, read at its second step, [B] int64."""
        at = (starts + self._context + 1) % self.ring.rows
        return self.ring.params_version[at, env_ids].astype(np.int64)

    def _plan_round(self, rounds: Rounds) -> None:
        """Plans the next round, if it is ready."""
        assert isinstance(self.sampler, Fifo)
        now = time.monotonic()
        state = (self.newest_version(), self.inserts, self.sampler.size)
        if state == self._refused and not rounds.waits_for_time:
            return
        keys = self.sampler.queued()
        starts, env_ids = self.locate(keys)
        versions = self._versions(starts, env_ids)
        self._round = rounds.decide(env_ids, versions, self.version, now, full=self._full)
        self._refused = state if self._round is None else None

    @property
    def in_rounds(self) -> bool:
        """Whether batches are rounds."""
        return self._rounds is not None

    def take_full_round(self) -> None:
        """Makes the next round take all items; for when no writer can add before it is taken."""
        self._full, self._refused = True, None

    def has_reported(self) -> np.ndarray | bool:
        """Returns the environments whose actors need not add to the next round, [num_envs] bool."""
        return False if self._rounds is None else self._rounds.reported

    def _drop_stale(self, limit: int) -> None:
        """Drops queued items that are more than ``limit`` versions behind the newest."""
        sampler = self.sampler
        if not sampler.size or (self.newest_version(), self.inserts) == self._checked:
            return
        self._checked = (self.version, self.inserts)
        assert isinstance(sampler, Fifo)
        keys = sampler.queued()
        keys = keys[self.version - self._versions(*self.locate(keys)) > limit]
        sampler.remove(keys % len(sampler.key_at))
        sampler.stale += len(keys)

    # Priorities, statistics and checkpoints.

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; ignores items no longer held."""
        keys, priorities = checked_priorities(self._where, keys, priorities)
        self.sampler.update(keys.astype(np.int64), priorities)

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items; ignores items no longer held."""
        if self._cfg.sampler == "fifo":
            raise ValueError(
                f"{self._where}.write_back: the sampler must be uniform or prioritized; a fifo "
                "does not draw its items again."
            )
        keys = np.asarray(keys).astype(np.int64)
        held = np.flatnonzero(self.sampler.held(keys))
        starts, env_ids = self.locate(keys)
        self.ring.write_output(self._where, starts + self._context, env_ids, updates, held)

    def stats(self) -> Logs:
        """Returns sizes, counters and the lag of the last batch's items."""
        logs = as_logs(
            size=self.sampler.size,
            inserts=self.inserts,
            samples=self.samples,
            dropped=self.sampler.dropped,
            dropped_stale=self.sampler.stale,
            lag_min=self._lag.min(),
            lag_mean=self._lag.mean(),
            lag_max=self._lag.max(),
        )
        if self._rounds is not None:
            logs |= as_logs(late=self._late, round_actors=self._round_actors)
        return logs

    def save(self, steps: PyTree) -> PyTree:
        """Returns the whole state as numpy arrays; ``steps`` is the copy of the ring."""
        counters = [self.inserts, self.samples, self.version, *self._checked, self._late]
        tree = {
            "steps": steps,
            "clock": self.counter.save(),
            "sampler": self.sampler.save(),
            "counters": np.array(counters, np.int64),
        }
        if self.processing is not None:
            tree["begins"] = self.processing.begins.save()
        return tree

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned, except the ring."""
        self.sampler.load(tree["sampler"])
        self.counter.load(tree["clock"])
        if self.processing is not None:
            self.processing.begins.load(tree["begins"])
        self.inserts, self.samples, self.version, *checked = map(int, tree["counters"])
        self._checked, self._late = (checked[0], checked[1]), checked[2]
        self._round = self._refused = None
