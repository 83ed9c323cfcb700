"""The reader's side of a shared replay buffer."""

from __future__ import annotations

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import Sample
from rlstack.replay.samplers import Fifo
from rlstack.replay.shared_memory.block import start_time
from rlstack.replay.shared_memory.steps import (
    ASKED,
    DEAD,
    INSERTS,
    NEWS,
    SAMPLES,
    SIZE,
    STARVED,
    SharedSteps,
    memory_fence,
)
from rlstack.replay.table import ItemTable
from rlstack.types import PyTree

_REDRAWS = 100  # attempts to replace items that were overwritten during the copy


class SharedMemReader:
    """Inserts the writers' published items into the table, and publishes the table's counts.

    It takes no lock and never waits.

    Attributes:
      asked: the batch size of the last refused request; None if the last request was granted.
      redrawn: number of items drawn again because they were overwritten during the copy.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, shared: SharedSteps, table: ItemTable):
        """Makes the table use the shared steps."""
        self._cfg, self._num_envs = cfg, num_envs
        self._shared, self._numbers, self._table = shared, shared.counters, table
        table.ring = shared.ring
        table.counter.separate()
        self._steps_held = table.items * cfg.step_period + cfg.unroll_length
        self._changed = True  # whether the table has changed since the last `publish`
        self._published: tuple[int, ...] = ()
        self.asked: int | None = None
        self.redrawn = 0

    def poll(self) -> None:
        """Inserts the items completed since the last call."""
        table, cfg = self._table, self._cfg
        steps, seen = self._numbers.steps.copy(), table.counter.steps
        if np.count_nonzero(steps == seen) == len(seen):
            return
        memory_fence()
        if cfg.sampler_factory:  # it needs to know where episodes were broken off
            table.counter.unbroken[:] = self._numbers.unbroken
        first, last = self._items_ended(seen), self._items_ended(steps)
        if cfg.sampler != "fifo":  # writers do not wait, and may have overwritten unseen items
            oldest = np.maximum(first, last - table.items)
            table.inserts += int((oldest - first).sum())  # counted as unbroken, but already lost
            first = oldest
        indices = first + np.arange((last - first).max())[:, None]
        if len(indices):
            ends = indices * cfg.step_period + cfg.unroll_length
            inside = indices < last
            keys = (indices * self._num_envs + table.counter.envs)[inside]
            marks = self._shared.marks[ends % table.ring.rows, table.counter.envs]
            unbroken = (marks == ends + 1)[inside]
            if cfg.sampler == "fifo":  # a broken item replaces no older one
                keys = keys[unbroken]
            if keys.size:
                table.insert(keys, None if cfg.sampler == "fifo" else unbroken)
        seen[:] = steps
        self._changed = True

    def _items_ended(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of items that end before these steps, including broken ones."""
        ended = (steps - 1 - self._cfg.unroll_length) // self._cfg.step_period + 1
        return np.maximum(ended, 0)

    def publish(self) -> None:
        """Publishes the table's counts, and then the steps that the counts include."""
        table, numbers = self._table, self._numbers
        news = (table.samples, table.sampler.size, *numbers.head[[ASKED, STARVED]].tolist())
        if not self._changed and news == self._published:
            return
        self._published = news
        numbers.head[SAMPLES] = table.samples
        numbers.head[SIZE], numbers.head[INSERTS] = table.sampler.size, table.inserts
        if isinstance(table.sampler, Fifo):
            released = self._items_ended(table.counter.steps) * self._cfg.step_period
            starts, env_ids = table.locate(table.sampler.queued())
            released[env_ids[::-1]] = starts[::-1]  # the oldest item's start is written last
            numbers.released[:] = released
        memory_fence()
        numbers.seen[:] = table.counter.steps
        memory_fence()
        numbers.head[NEWS] += 1
        self._changed = False

    def blocking_rule(self, size: int) -> str:
        """Polls; returns the name of the rule that blocks a sample now, or ""."""
        self.poll()
        rule = self._table.blocking_rule(size)
        self._answer(size, rule)
        if rule and self.drop_oldest():
            rule = self._table.blocking_rule(size)
            self._answer(size, rule)
        self.publish()
        return rule

    def _answer(self, size: int, rule: str) -> None:
        self.asked = size if rule else None
        head = self._numbers.head
        head[ASKED], head[STARVED] = self.asked or 0, rule not in ("", "samples_per_insert")

    def update_refusal(self) -> None:
        """Updates the last refusal, for a writer in the reader's own thread."""
        if self.asked is not None:
            rule = self._table.blocking_rule(self.asked)
            self._numbers.head[STARVED] = rule not in ("", "samples_per_insert")

    def drop_oldest(self, waits: np.ndarray | bool = False) -> bool:
        """Drops the oldest fifo items if all writers wait while no batch can be drawn.

        Rounds drop nothing: the next round takes all items. An actor that has reported counts as a
        writer that waits, because it adds nothing more until it has newer params.

        Args:
          waits: environments with a writer that waits and has not published this, [num_envs] bool.
            Their writer's thread may be the reader's own, so a round would not help it.

        Returns:
          Whether items were dropped, or a round may now be drawn.
        """
        table, numbers, sampler = self._table, self._numbers, self._table.sampler
        if not isinstance(sampler, Fifo) or self.asked is None:
            return False
        self.publish()
        # A writer that has seen the newest NEWS and still waits is blocked until something changes.
        waiting = (numbers.blocked == 1 + numbers.head[NEWS]) | waits
        if not (waiting | (numbers.blocked == DEAD) | table.has_reported()).all():
            return False
        if table.in_rounds and not waiting.any():  # the others may still report
            return False
        memory_fence()
        self.poll()
        if self._changed:  # they added steps before they began to wait, and must check again
            self.publish()
            return False
        keys = sampler.queued().copy()
        if not keys.size or not table.blocking_rule(self.asked):
            return False
        if table.in_rounds and waits is False:
            table.take_full_round()
            return True
        starts, env_ids = table.locate(keys)
        full = table.counter.steps[env_ids] >= starts + self._steps_held
        keys = keys[full] if full.any() else keys[: self._num_envs]
        sampler.remove(keys % len(sampler.key_at))
        sampler.dropped += len(keys)
        self.publish()
        return True

    def find_dead(self) -> None:
        """Marks the environments of writers that have ended."""
        numbers = self._numbers
        for pid in np.unique(numbers.pid[numbers.pid != 0]):
            ended = numbers.start_time != start_time(int(pid))
            numbers.blocked[(numbers.pid == pid) & ended] = DEAD

    def take(self, size: int, most: int | None = None) -> Sample | None:
        """Draws and copies batches; call it only when no rule blocks one.

        Args:
          size: items in each.
          most: the largest number of batches; the sample then has a leading axis of those that the
            rules allow. None: one batch, without this axis.

        Returns:
          The sample; None if writers kept overwriting the drawn items.
        """
        table, reserved = self._table, self._numbers.reserved
        if most is None:
            keys, relative_probs = table.draw(size)
        else:
            keys, relative_probs = table.draw_several(size, table.num_ready(size, most))
        starts, env_ids = table.locate(keys)
        trajectory = table.ring.gather(starts, env_ids)
        shape = keys.shape
        keys, relative_probs = keys.ravel(), relative_probs.ravel()
        starts, env_ids = starts.ravel(), env_ids.ravel()
        # A fifo's items stay until `publish` releases them.
        unchecked = np.arange(keys.size if self._cfg.sampler != "fifo" else 0)
        for _ in range(_REDRAWS):
            memory_fence()
            # The items copied in the last pass that have been overwritten since.
            unchecked = unchecked[
                reserved[env_ids[unchecked]] > starts[unchecked] + table.ring.rows
            ]
            if not unchecked.size:
                sample = table.finish(
                    keys.reshape(shape), relative_probs.reshape(shape), trajectory
                )
                self.publish()
                return sample
            self.redrawn += unchecked.size
            self.poll()
            if not table.sampler.ready(unchecked.size):
                return None
            keys[unchecked], relative_probs[unchecked] = table.sampler.draw(unchecked.size)
            starts[unchecked], env_ids[unchecked] = table.locate(keys[unchecked])
            table.ring.gather_again(trajectory, unchecked, starts[unchecked], env_ids[unchecked])
        return None

    def save(self) -> PyTree:
        """Returns the whole state, except items that are overwritten during the call."""
        self.poll()
        table, numbers = self._table, self._numbers
        table.counter.unbroken[:] = numbers.unbroken
        rings = self._shared.save(table.counter.steps, self._cfg)
        memory_fence()
        held = table.sampler.key_at[table.sampler.key_at >= 0]
        starts, env_ids = table.locate(held)
        lost = held[numbers.reserved[env_ids] > starts + table.ring.rows]
        if self._cfg.sampler != "fifo" and lost.size:
            table.sampler.remove(lost % len(table.sampler.key_at))
        return table.save(rings)

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned; call it before any process writes."""
        table, numbers = self._table, self._numbers
        table.load(tree)
        table.counter.separate()
        self._shared.load(tree["steps"], table.counter.steps, self._cfg)
        numbers.unbroken[:] = table.counter.unbroken
        numbers.reserved[:] = numbers.steps[:] = table.counter.steps
        numbers.pid[:] = 0
        self.asked, self._changed = None, True
        self.publish()
