"""Items that were fetched from a Reverb server and wait to be handed out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlstack.replay.base import ReplayConfig
from rlstack.replay.reverb.calls import Shared
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.rows import DATA, KEY, make_row
from rlstack.replay.reverb.rules import capacity
from rlstack.replay.rounds import Round, Rounds
from rlstack.types import PyTree


class Waiting:
    """Decides which fetched items go next: staleness, rounds, items that go several times.

    Attributes:
      looks: whether it matters how old items are, or whose.
      in_rounds: whether batches are rounds.
      stale: items dropped because they were too old, or stood in the way of a round.
      late: items of older versions in rounds.
      round_actors: actors that had reported for the last round.
    """

    def __init__(
        self, cfg: ReplayConfig, num_envs: int, num_actors: int, rows: list[Any], shared: Shared
    ):
        """Looks after ``rows``, oldest first, which others append to."""
        self._cfg, self._rows, self._shared = cfg, rows, shared
        self._capacity = capacity(cfg, num_envs)
        self._rounds = Rounds(cfg.min_actors, cfg.grace_seconds, num_actors, num_envs)
        self._round: Round | None = None
        self.in_rounds = cfg.min_actors > 0
        self.looks = self.in_rounds or cfg.max_staleness is not None
        self.stale = self.late = self.round_actors = 0

    def drop_stale(self) -> None:
        """Drops items that lie too far behind the newest version."""
        limit, rows = self._cfg.max_staleness, self._rows
        if not self.looks or not rows:
            return
        self._shared.saw_version(max(row.version for row in rows))
        if limit is not None:
            fresh = [row for row in rows if self._shared.version - row.version <= limit]
            self.stale += len(rows) - len(fresh)
            rows[:] = fresh

    def plan(self) -> int:
        """Plans the next round, if it may go; returns its items, 0 for not yet."""
        env_ids = np.array([row.env_id for row in self._rows], np.int64)
        versions = np.array([row.version for row in self._rows], np.int64)
        now = time.monotonic()
        self._round = self._rounds.decide(env_ids, versions, self._shared.version, now)
        if self._round is None:
            self._make_room(env_ids, versions)
            return 0
        return len(self._round.take)

    def _make_room(self, env_ids: np.ndarray, versions: np.ndarray) -> None:
        """Drops an item if nothing more could come otherwise, as any full fifo does.

        What is no report of the newest version, or not its environment's only one, is in the way:
        items that came too late for the last round, and those of an actor that runs ahead.
        """
        rows = self._rows
        if len(rows) < self._capacity or self._rounds.waits_for_time:
            return
        spare = versions < self._shared.version
        spare[np.setdiff1d(np.arange(len(rows)), np.unique(env_ids, return_index=True)[1])] = True
        if spare.any():
            del rows[int(np.argmax(spare))]
            self.stale += 1

    def take(self, size: int) -> list[Any]:
        """Takes the oldest items, or the planned round."""
        held = self._rows
        if self._round is None:
            rows, rest = held[:size], held[size:]
        else:
            taken = set(self._round.take.tolist())
            rows = [held[i] for i in self._round.take]
            rest = [row for i, row in enumerate(held) if i not in taken]
            self._rounds.start_over()
            self.late += self._round.late
            self.round_actors, self._round = self._round.actors, None
        if self._cfg.sampler == "fifo":
            for row in rows:
                row.times += 1
            rest = [row for row in rows if row.times < self._cfg.times_limit] + rest
        held[:] = rest
        return rows

    def save(self, shape: tuple[int, int]) -> dict[str, np.ndarray]:
        """Returns what was dropped and, of a fifo, what waits.

        Args:
          shape: of an item's bytes.
        """
        self.drop_stale()
        rows = self._rows if self._cfg.sampler == "fifo" else []
        return {
            "data": np.stack([r[DATA] for r in rows]) if rows else np.zeros((0, *shape), np.uint8),
            "keys": np.array([row[KEY] for row in rows], np.uint64),
            "times": np.array([row.times for row in rows], np.int64),
            "dropped": np.array([self.stale, self.late], np.int64),
        }

    def load(self, tree: PyTree, packing: Packing) -> None:
        """Puts back what ``save`` returned."""
        self.stale, self.late = map(int, tree["dropped"])
        for data, key, times in zip(tree["data"], tree["keys"], tree["times"], strict=True):
            fields = [key, np.float64(1), np.int64(1), np.float64(1), data]
            self._rows.append(make_row(packing, self._cfg, fields, int(times)))
