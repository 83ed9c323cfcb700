"""Ragged batches: for each environment as many values as there are, stored one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlstack.networks.packing import PackedIndex, Packing, ladder, pack, packed_index

__all__ = [
    "PackedIndex",
    "Packing",
    "Ragged",
    "from_lists",
    "from_padded",
    "ladder",
    "offsets",
    "pack",
    "packed_index",
    "select",
    "split",
    "to_padded",
    "with_capacity",
]


class Ragged(NamedTuple):
    """Values of B rows, row by row; N of them, and perhaps padding behind."""

    values: np.ndarray  # [N, ...]
    row_ids: np.ndarray  # [N] int32, the row of each value; B at padding
    lengths: np.ndarray  # [B] int32, how many each row has


def from_lists(rows: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Ragged:
    """Returns rows of values, each array-like ``[length, *shape]``; for tests and by hand."""
    arrays = [np.asarray(row, dtype).reshape(-1, *shape) for row in rows]
    lengths = np.array([len(array) for array in arrays], np.int32)
    values = np.concatenate(arrays) if arrays else np.zeros((0, *shape), dtype)
    return Ragged(values, _row_ids(lengths), lengths)


def select(table: np.ndarray, chosen: np.ndarray) -> Ragged:
    """Returns those values of ``table`` ([B, C, ...]) that are ``chosen`` ([B, C] bool)."""
    places = np.flatnonzero(chosen)
    values = table.reshape(chosen.size, *table.shape[2:]).take(places, axis=0)
    lengths = np.count_nonzero(chosen, axis=1).astype(np.int32)
    return Ragged(values, _row_ids(lengths), lengths)


def from_padded(table: np.ndarray, counts: np.ndarray) -> Ragged:
    """Returns the first ``counts`` ([B] int) values of each row of ``table`` ([B, C, ...])."""
    return select(table, np.arange(table.shape[1]) < np.asarray(counts)[:, None])


def to_padded(ragged: Ragged, capacity: int, fill: Any = 0) -> np.ndarray:
    """Returns ``[B, capacity, ...]`` with ``fill`` behind each row's values.

    Raises:
      ValueError: a row is longer.
    """
    longest = int(ragged.lengths.max(initial=0))
    if longest > capacity:
        raise ValueError(
            f"to_padded: capacity must be at least {longest}, the longest row; got {capacity}."
        )
    size = int(ragged.lengths.sum())
    table = np.full(
        (len(ragged.lengths), capacity, *ragged.values.shape[1:]), fill, ragged.values.dtype
    )
    rows = ragged.row_ids[:size]
    table[rows, np.arange(size) - offsets(ragged)[rows]] = ragged.values[:size]
    return table


def offsets(ragged: Ragged) -> np.ndarray:
    """Returns where each row begins among the values, [B] int32."""
    return (np.cumsum(ragged.lengths) - ragged.lengths).astype(np.int32)


def split(ragged: Ragged) -> list[np.ndarray]:
    """Returns the values of each row, without padding; views."""
    size = int(ragged.lengths.sum())
    return np.split(ragged.values[:size], np.cumsum(ragged.lengths)[:-1])


def with_capacity(ragged: Ragged, capacity: int | None = None) -> Ragged:
    """Returns the same with zeros behind, up to ``capacity`` or the next rung of ``ladder``.

    What is jitted on it then compiles once a rung, not once a number of values.

    Raises:
      ValueError: there are more values than ``capacity``.
    """
    size = len(ragged.values)
    room = ladder(size) if capacity is None else capacity
    if size > room:
        raise ValueError(f"with_capacity: must hold {size} values; got a capacity of {room}.")
    values = np.zeros((room, *ragged.values.shape[1:]), ragged.values.dtype)
    values[:size] = ragged.values
    row_ids = np.full(room, len(ragged.lengths), np.int32)
    row_ids[:size] = ragged.row_ids
    return Ragged(values, row_ids, ragged.lengths)


def _row_ids(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
