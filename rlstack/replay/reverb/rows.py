"""Items as Reverb gives them, and batches made of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlstack.replay.base import ReplayConfig
from rlstack.replay.reverb.packing import Packing

KEY, PROBABILITY, SIZE, DATA = 0, 1, 2, 4  # what Reverb gives of an item; the table's size


class Row(list):
    """An item as Reverb gives it, and what a fifo must know of it."""

    __slots__ = ("env_id", "times", "version")
    env_id: int
    version: int
    times: int  # batches it has been in


def make_row(packing: Packing, cfg: ReplayConfig, fields: list, times: int = 0) -> Row:
    """Returns a fifo's item with what must be known of it."""
    row = Row(fields)
    row.env_id, row.version = packing.head(fields[DATA], cfg.context)
    row.times = times
    return row


class Drawn(NamedTuple):
    """A batch of items; what a learner's process needs of it."""

    keys: np.ndarray  # [B] uint64
    odds: np.ndarray | None  # [B], how much likelier than on average each was drawn, N * P
    leaves: list[np.ndarray]  # of the trajectory, [T+1, B, ...]

    def cut(self, start: int, stop: int) -> Drawn:
        """Returns some of the items, as views."""
        odds = None if self.odds is None else self.odds[start:stop]
        return Drawn(self.keys[start:stop], odds, [leaf[:, start:stop] for leaf in self.leaves])


def draw(packing: Packing, rows: list[list], *, odds: bool, reuse: bool = True) -> Drawn:
    """Makes a batch of items.

    Args:
      packing: of the items.
      rows: as Reverb gives them.
      odds: whether they are needed.
      reuse: whether the leaves may lie in reused memory.
    """
    return Drawn(
        _column(rows, KEY, np.uint64),
        _column(rows, PROBABILITY, np.float64) * _column(rows, SIZE, np.float64) if odds else None,
        packing.gather([row[DATA] for row in rows], reuse=reuse),
    )


def _column(rows: list[list], index: int, dtype: type) -> np.ndarray:
    """Returns a number of each row."""
    return np.fromiter([row[index] for row in rows], dtype, len(rows))


def join(parts: list[Drawn]) -> Drawn:
    """Makes one batch of several."""
    if len(parts) == 1:
        return parts[0]
    odds = None if parts[0].odds is None else np.concatenate([part.odds for part in parts])
    leaves = [
        np.concatenate(leaf, axis=1) for leaf in zip(*(part.leaves for part in parts), strict=True)
    ]
    return Drawn(np.concatenate([part.keys for part in parts]), odds, leaves)
