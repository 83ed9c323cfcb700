"""Packs sequences of different lengths into rows of one width, to reduce padding in attention.

Attention within an environment needs its entities in one row, and the environments of a batch
differ in their number of entities. If sizes are skewed, padding each environment to the longest one
wastes most of the work. Packing puts several short environments into one row, and a mask separates
them. This module uses numpy and runs on the host.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np


class RowAssignment(NamedTuple):
    """The row and column of each of B sequences; sequences in one row never overlap."""

    row: np.ndarray  # [B] int32
    column: np.ndarray  # [B] int32, of the sequence's first entity
    num_rows: int


class PackedIndex(NamedTuple):
    """The place of each entity; entities are numbered sequence by sequence, 0 to N - 1."""

    entities: np.ndarray  # [num_rows, width] int32, the entity at each place; 0 at padding
    batch: np.ndarray  # [num_rows, width] int32, the sequence it belongs to; -1 at padding
    inverse: np.ndarray  # [N] int32, the place of each entity, row * width + column


def ladder(size: int, steps: int = 2) -> int:
    """Rounds ``size`` up to a size of the ladder, so that few shapes are compiled.

    The ladder has the powers of two and, between each two of them, ``steps - 1`` more sizes at
    equal distances: 1, 2, 3, 4, 6, 8, 12, 16 ... for two steps. At large sizes, less than
    ``1 / (steps + 1)`` is padding.

    Raises:
      ValueError: ``size`` is negative, or ``steps`` is not a power of two.
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


def pack(lengths: np.ndarray, width: int) -> RowAssignment:
    """Assigns sequences of ``lengths`` ([B] int) to rows of ``width``, first fit decreasing.

    Each row takes the longest remaining sequence, and then repeatedly the longest one that still
    fits. This needs at most 11/9 of the minimal number of rows plus 6/9 of a row (Dósa, 2007). Rows
    with the same lengths are made together, so that Python loops over the distinct lengths and not
    over B. Rows are numbered by their first sequence, and the sequences of a row are in order, so
    the result depends only on the arguments. An empty sequence is at row 0, column 0.

    Raises:
      ValueError: a length is negative or greater than ``width``.
    """
    lengths = np.asarray(lengths, np.int64)
    size = lengths.shape[0]
    if size and (lengths.min() < 0 or lengths.max() > width):
        raise ValueError(
            f"pack: lengths must lie in [0, width={width}]; got "
            f"{int(lengths.min())} to {int(lengths.max())}."
        )
    by_length = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=1)
    ends = size - np.cumsum(counts)  # sequences of length l begin at by_length[ends[l]]
    groups, num_rows = _assign_groups(counts, ends, width)
    row = np.zeros(size, np.int64)
    if num_rows:
        start, taken, first_row, per_row = groups.T
        ordinal = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        members = by_length[np.repeat(start, taken) + ordinal]
        row[members] = np.repeat(first_row, taken) + ordinal // np.repeat(per_row, taken)
        row = _by_first_member(row, lengths > 0, num_rows)
    return RowAssignment(row.astype(np.int32), _columns(row, lengths), num_rows)


def packed_index(assigned: RowAssignment, lengths: np.ndarray, width: int) -> PackedIndex:
    """Returns the place of each entity, and the entity at each place.

    Args:
      assigned: the result of ``pack(lengths, width)``.
      lengths: [B] int.
      width: the width of a row.
    """
    lengths = np.asarray(lengths, np.int64)
    first = np.cumsum(lengths) - lengths
    place = np.repeat(assigned.row.astype(np.int64) * width + assigned.column - first, lengths)
    place += np.arange(place.shape[0])
    index = np.zeros(assigned.num_rows * width, np.int32)
    batch = np.full(assigned.num_rows * width, -1, np.int32)
    index[place] = np.arange(place.shape[0])
    batch[place] = np.repeat(np.arange(lengths.shape[0]), lengths)
    shape = (assigned.num_rows, width)
    return PackedIndex(index.reshape(shape), batch.reshape(shape), place.astype(np.int32))


def _assign_groups(counts: np.ndarray, starts: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """Assigns groups of sequences of equal length to rows.

    Args:
      counts: the number of sequences of each length, from 0.
      starts: position of the first sequence of each length, among all sequences sorted by length.
      width: the width of a row.

    Returns:
      [groups, 4], for each group the position of its first sequence, its number of sequences, its
      first row and the number of its sequences per row; and the number of rows.
    """
    lengths = (np.flatnonzero(counts[1:]) + 1).tolist()  # ascending; those with sequences left
    left = counts.tolist()
    start = starts.tolist()
    groups = []
    num_rows = 0
    while lengths:
        free = width
        members = []  # (length, number of such sequences) of the next row
        position = len(lengths)
        while position and free >= lengths[0]:
            position = bisect.bisect_right(lengths, free, 0, position) - 1
            if position < 0:
                break
            length = lengths[position]
            several = min(left[length], free // length)
            members.append((length, several))
            free -= several * length
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
    """Renumbers the rows by their first sequence."""
    members = np.flatnonzero(real)[::-1]
    first = np.empty(num_rows, np.int64)
    first[row[members]] = members  # of several sequences in a row, the last assignment counts
    rank = np.empty(num_rows, np.int64)
    rank[np.argsort(first)] = np.arange(num_rows)
    renumbered = np.zeros_like(row)
    renumbered[real] = rank[row[real]]
    return renumbered


def _columns(row: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the column of each sequence, given that those of a row are in order, [B] int32."""
    order = np.argsort(row, kind="stable")
    sorted_row, sorted_length = row[order], lengths[order]
    before = np.cumsum(sorted_length) - sorted_length
    begins = np.searchsorted(sorted_row, sorted_row)  # the first sequence of the same row
    column = np.empty(row.shape[0], np.int32)
    column[order] = before - before[begins]
    column[lengths == 0] = 0
    return column
