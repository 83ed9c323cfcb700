"""Packing ragged sequences into rows of one width, so that attention pads little.

Attention within an environment needs its entities side by side, and a batch's environments differ
in how many they have. Padding each to the longest wastes most of the work when sizes are skewed;
packing lays several short ones into one row, and a mask keeps them apart. Pure numpy, on the host.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """Where each of B sequences lies; sequences in one row never overlap."""

    row: np.ndarray  # [B] int32
    column: np.ndarray  # [B] int32, where in its row it begins
    num_rows: int


class PackedIndex(NamedTuple):
    """A packing, entity by entity; entities are numbered sequence by sequence, 0..N-1."""

    entities: np.ndarray  # [num_rows, width] int32, the entity at each place; 0 at padding
    batch: np.ndarray  # [num_rows, width] int32, the sequence it belongs to; -1 at padding
    inverse: np.ndarray  # [N] int32, the place of each entity, row * width + column


def ladder(size: int, steps: int = 2) -> int:
    """Returns the least rung that is at least ``size``, so that few shapes are ever compiled.

    Rungs are the powers of two and, between each two, ``steps - 1`` more at equal distances: 1, 2,
    3, 4, 6, 8, 12, 16 ... for two steps. Less than ``1 / (steps + 1)`` of a large rung is unused.

    Raises:
      ValueError: a negative size, or ``steps`` that is not a power of two.
    """
    if size < 0 or steps < 1 or steps & (steps - 1):
        raise ValueError(
            "ladder: size must not be negative and steps must be a power of two; got "
            f"size={size}, steps={steps}."
        )
    if size <= steps:
        return max(size, 1)
    gap = max((1 << (size - 1).bit_length() - 1) // steps, 1)
    return -(-size // gap) * gap


def pack(lengths: np.ndarray, width: int) -> Packing:
    """Lays sequences of ``lengths`` ([B] int) into rows of ``width``, first fit decreasing.

    Each row takes the longest sequence left and then again and again the longest that still fits,
    which needs at most 11/9 of the fewest rows possible and 6/9 of one (Dósa, 2007). Rows of equal
    make-up are made at once, so Python loops over the distinct lengths and not over B. Rows are
    numbered by the first sequence in them and sequences stand in order within a row, so the result
    is a function of the arguments alone. A sequence of no length takes no room, at row 0, column 0.

    Raises:
      ValueError: a length is negative or does not fit.
    """
    lengths = np.asarray(lengths, np.int64)
    size = lengths.shape[0]
    if size and (lengths.min() < 0 or lengths.max() > width):
        raise ValueError(
            f"pack: lengths must lie in [0, {width}], the width; got "
            f"{int(lengths.min())} to {int(lengths.max())}."
        )
    by_length = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=1)
    ends = size - np.cumsum(counts)  # of equal length l, by_length holds ends[l] and onwards
    groups, num_rows = _make_up(counts, ends, width)
    row = np.zeros(size, np.int64)
    if num_rows:
        start, taken, first_row, per_row = groups.T
        ordinal = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        members = by_length[np.repeat(start, taken) + ordinal]
        row[members] = np.repeat(first_row, taken) + ordinal // np.repeat(per_row, taken)
        row = _by_first_member(row, lengths > 0, num_rows)
    return Packing(row.astype(np.int32), _columns(row, lengths), num_rows)


def packed_index(packing: Packing, lengths: np.ndarray, width: int) -> PackedIndex:
    """Returns where each entity of ``packing`` stands, there and back.

    Args:
      packing: what ``pack(lengths, width)`` returned.
      lengths: [B] int.
      width: of a row.
    """
    lengths = np.asarray(lengths, np.int64)
    first = np.cumsum(lengths) - lengths
    place = np.repeat(packing.row.astype(np.int64) * width + packing.column - first, lengths)
    place += np.arange(place.shape[0])
    index = np.zeros(packing.num_rows * width, np.int32)
    batch = np.full(packing.num_rows * width, -1, np.int32)
    index[place] = np.arange(place.shape[0])
    batch[place] = np.repeat(np.arange(lengths.shape[0]), lengths)
    shape = (packing.num_rows, width)
    return PackedIndex(index.reshape(shape), batch.reshape(shape), place.astype(np.int32))


def _make_up(counts: np.ndarray, starts: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """Returns which sequences fill which rows, and how many rows that makes.

    Returns:
      [groups, 4] of: the first sequence (as a position among those sorted by length), how many
      sequences, the first row, how many in each row; and the number of rows.
    """
    lengths = (np.flatnonzero(counts[1:]) + 1).tolist()  # ascending, those that are left
    left = counts.tolist()
    start = starts.tolist()
    groups = []
    num_rows = 0
    while lengths:
        room = width
        members = []  # (length, how many of it) of the next row
        position = len(lengths)
        while position and room >= lengths[0]:
            position = bisect.bisect_right(lengths, room, 0, position) - 1
            if position < 0:
                break
            length = lengths[position]
            several = min(left[length], room // length)
            members.append((length, several))
            room -= several * length
        repeats = min(left[length] // several for length, several in members)
        for length, several in members:
            taken = several * repeats
            groups.append((start[length], taken, num_rows, several))
            start[length] += taken
            left[length] -= taken
            if not left[length]:
                del lengths[bisect.bisect_left(lengths, length)]
        num_rows += repeats
    return np.array(groups, np.int64).reshape(-1, 4), num_rows


def _by_first_member(row: np.ndarray, real: np.ndarray, num_rows: int) -> np.ndarray:
    """Renumbers the rows by the first sequence in them."""
    members = np.flatnonzero(real)[::-1]
    first = np.empty(num_rows, np.int64)
    first[row[members]] = members  # of several, the last assigned stays
    rank = np.empty(num_rows, np.int64)
    rank[np.argsort(first)] = np.arange(num_rows)
    renumbered = np.zeros_like(row)
    renumbered[real] = rank[row[real]]
    return renumbered


def _columns(row: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns where each sequence begins when those of a row stand in order, [B] int32."""
    order = np.argsort(row, kind="stable")
    sorted_row, sorted_length = row[order], lengths[order]
    before = np.cumsum(sorted_length) - sorted_length
    begins = np.searchsorted(sorted_row, sorted_row)  # the first sequence of the same row
    column = np.empty(row.shape[0], np.int32)
    column[order] = before - before[begins]
    column[lengths == 0] = 0
    return column
