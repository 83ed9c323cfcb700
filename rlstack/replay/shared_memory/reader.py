"""The reader's side of a shared replay buffer."""

from __future__ import annotations

import numpy as np

from rlstack.replay.base import ReplayConfig, Sample
from rlstack.replay.samplers import Fifo
from rlstack.replay.shared_memory.block import birth
from rlstack.replay.shared_memory.steps import (
    ASKED,
    DEAD,
    INSERTS,
    NEWS,
    SAMPLES,
    SIZE,
    STARVED,
    SharedSteps,
    fence,
)
from rlstack.replay.table import Table
from rlstack.types import PyTree

_REDRAWS = 100  # times that items overwritten while they were copied are drawn anew at a stretch


class SharedMemReader:
    """Takes up what writers have published, and tells them what the table holds.

    It knows no lock, and never waits.

    Attributes:
      asked: the batch size that was refused last; None if the last one was granted.
      redrawn: items drawn anew because they were overwritten while they were copied.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, shared: SharedSteps, table: Table):
        """Puts a table over shared steps."""
        self._cfg, self._num_envs = cfg, num_envs
        self._shared, self._numbers, self._table = shared, shared.counters, table
        table.ring = shared.ring
        table.clock.part()
        self._room = table.items * cfg.step_period + cfg.unroll_length
        self._changed = True  # whether steps were taken up since they were published
        self._published: tuple = ()
        self.asked: int | None = None
        self.redrawn = 0

    def poll(self) -> None:
        """Takes up the items completed since the last time."""
        table, cfg = self._table, self._cfg
        steps, seen = self._numbers.steps.copy(), table.clock.steps
        if np.count_nonzero(steps == seen) == len(seen):
            return
        fence()
        first, last = self._turns(seen), self._turns(steps)
        if cfg.sampler != "fifo":  # whose writers do not wait, and may have come round
            oldest = np.maximum(first, last - table.items)
            table.inserts += int((oldest - first).sum())  # taken for whole, and lost already
            first = oldest
        turns = first + np.arange((last - first).max())[:, None]
        if len(turns):
            ends = turns * cfg.step_period + cfg.unroll_length
            inside = turns < last
            keys = (turns * self._num_envs + table.clock.envs)[inside]
            marks = self._shared.marks[ends % table.ring.rows, table.clock.envs]
            whole = (marks == ends + 1)[inside]
            if cfg.sampler == "fifo":  # whose items stay when a broken one has its turn
                keys = keys[whole]
            if keys.size:
                table.insert(keys, None if cfg.sampler == "fifo" else whole)
        seen[:] = steps
        self._changed = True

    def _turns(self, steps: np.ndarray) -> np.ndarray:
        """Returns how many items would have ended below these steps, were none broken."""
        ended = (steps - 1 - self._cfg.unroll_length) // self._cfg.step_period + 1
        return np.maximum(ended, 0)

    def publish(self) -> None:
        """Tells writers what the table holds; the counts before what is counted."""
        table, numbers = self._table, self._numbers
        news = (table.samples, table.sampler.size, *numbers.head[[ASKED, STARVED]].tolist())
        if not self._changed and news == self._published:
            return
        self._published = news
        numbers.head[SAMPLES] = table.samples
        numbers.head[SIZE], numbers.head[INSERTS] = table.sampler.size, table.inserts
        if isinstance(table.sampler, Fifo):
            released = self._turns(table.clock.steps) * self._cfg.step_period
            starts, env_ids = table.locate(table.sampler.waiting())
            released[env_ids[::-1]] = starts[::-1]  # the oldest item's is put last
            numbers.released[:] = released
        fence()
        numbers.seen[:] = table.clock.steps
        fence()
        numbers.head[NEWS] += 1
        self._changed = False

    def obstacle(self, size: int) -> str:
        """Returns what stands in the way of a sample after all that writers have published."""
        self.poll()
        found = self._table.obstacle(size)
        self._answer(size, found)
        if found and self.relieve():
            found = self._table.obstacle(size)
            self._answer(size, found)
        self.publish()
        return found

    def _answer(self, size: int, found: str) -> None:
        self.asked = size if found else None
        head = self._numbers.head
        head[ASKED], head[STARVED] = self.asked or 0, found not in ("", "samples_per_insert")

    def look_again(self) -> None:
        """Brings the last refusal up to date, for a writer in the reader's own thread."""
        if self.asked is not None:
            found = self._table.obstacle(self.asked)
            self._numbers.head[STARVED] = found not in ("", "samples_per_insert")

    def relieve(self, waits: np.ndarray | bool = False) -> bool:
        """Drops the oldest fifo items if all writers wait for room and no batch can be had.

        Args:
          waits: environments whose writer waits although it has not said so, [num_envs] bool.

        Returns:
          Whether it has.
        """
        table, numbers, sampler = self._table, self._numbers, self._table.sampler
        if not isinstance(sampler, Fifo) or self.asked is None:
            return False
        self.publish()
        # Who has looked since the last news and had to wait then, waits for good.
        stuck = (numbers.waiting == 1 + numbers.head[NEWS]) | (numbers.waiting == DEAD) | waits
        if not stuck.all():
            return False
        fence()
        self.poll()
        if self._changed:  # by what they put before they began to wait: they must look again
            self.publish()
            return False
        keys = sampler.waiting().copy()
        if not keys.size or not table.obstacle(self.asked):
            return False
        starts, env_ids = table.locate(keys)
        full = table.clock.steps[env_ids] >= starts + self._room
        keys = keys[full] if full.any() else keys[: self._num_envs]
        sampler.remove(keys % len(sampler.key_at))
        sampler.dropped += len(keys)
        self.publish()
        return True

    def find_dead(self) -> None:
        """Marks the environments whose writer has ended."""
        numbers = self._numbers
        for pid in np.unique(numbers.pid[numbers.pid != 0]):
            numbers.waiting[(numbers.pid == pid) & (numbers.birth != birth(int(pid)))] = DEAD

    def take(self, size: int) -> Sample | None:
        """Draws and copies a batch; None if writers overwrote it as fast as it was drawn."""
        table, reserved = self._table, self._numbers.reserved
        keys, odds = table.draw(size)
        starts, env_ids = table.locate(keys)
        trajectory = table.ring.gather(starts, env_ids)
        # A fifo's items stay until `publish` releases them.
        fresh = np.arange(len(keys) if self._cfg.sampler != "fifo" else 0)
        for _ in range(_REDRAWS):
            fence()
            # Copied since `reserved` was looked at last, and overwritten by now.
            fresh = fresh[reserved[env_ids[fresh]] > starts[fresh] + table.ring.rows]
            if not fresh.size:
                sample = table.finish(keys, odds, trajectory)
                self.publish()
                return sample
            self.redrawn += fresh.size
            self.poll()
            if not table.sampler.ready(fresh.size):
                return None
            keys[fresh], odds[fresh] = table.sampler.draw(fresh.size)
            starts[fresh], env_ids[fresh] = table.locate(keys[fresh])
            table.ring.gather_again(trajectory, fresh, starts[fresh], env_ids[fresh])
        return None

    def save(self) -> PyTree:
        """Returns the whole state; without items that are overwritten meanwhile."""
        self.poll()
        table, numbers = self._table, self._numbers
        table.clock.unbroken[:] = numbers.unbroken
        rings = self._shared.save(table.clock.steps, self._cfg)
        fence()
        held = table.sampler.key_at[table.sampler.key_at >= 0]
        starts, env_ids = table.locate(held)
        lost = held[numbers.reserved[env_ids] > starts + table.ring.rows]
        if self._cfg.sampler != "fifo" and lost.size:
            table.sampler.remove(lost % len(table.sampler.key_at))
        return table.save(rings)

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned; nobody has written since."""
        table, numbers = self._table, self._numbers
        table.load(tree)
        table.clock.part()
        self._shared.load(tree["steps"], table.clock.steps, self._cfg)
        numbers.unbroken[:] = table.clock.unbroken
        numbers.reserved[:] = numbers.steps[:] = table.clock.steps
        numbers.pid[:] = 0
        self.asked, self._changed = None, True
        self.publish()
