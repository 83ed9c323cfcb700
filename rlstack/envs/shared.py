"""The memory that a process pool and its workers share.

It is an anonymous file: workers inherit its descriptor, it has no name that could stay behind, and
the kernel frees it with its last user, however that one ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from dm_env import specs

_ALIGN = 64  # bytes: a cache line, so that columns do not share one

Column = tuple[tuple[int, ...], str]  # shape, dtype


def open_block() -> int:
    """Returns the descriptor of an empty anonymous file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlstack-envs", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Table:
    """Columns of all environments in one block; what ``Episode`` writes rows to.

    There are two banks of rows. A worker writes the bank that the parent does not read, so that
    the last good row is still whole when the worker dies while writing.

    Attributes:
      banks: two ``Bank``s.
      actions: the action's leaves, each ``[N, ...]``.
      beats: ``[N]`` int64, counts finished steps; a worker that hangs stops counting.
    """

    def __init__(self, fd: int, observed: list[specs.Array], acted: list[specs.Array], size: int):
        """Maps the block and makes it as large as it must be."""
        rows: list[Column] = [((size,), "int32"), ((size,), "float32"), ((size,), "float32")]
        rows += [((size, *s.shape), np.dtype(s.dtype).str) for s in observed]
        columns: list[Column] = [*rows, *rows, ((size,), "int64")]
        columns += [((size, *s.shape), np.dtype(s.dtype).str) for s in acted]
        offsets, end = [], 0
        for shape, dtype in columns:
            offsets.append(end)
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        if os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)
        self._map = mmap.mmap(fd, end)
        arrays: list[np.ndarray] = [
            np.ndarray(shape, dtype, self._map, offset)
            for (shape, dtype), offset in zip(columns, offsets, strict=True)
        ]
        n = len(rows)
        self.banks = (Bank(arrays[:n]), Bank(arrays[n : 2 * n]))
        self.beats = arrays[2 * n]
        self.actions = arrays[2 * n + 1 :]


class Bank:
    """Rows in shared memory, with the fields of ``rlstack.envs.episode.Rows``."""

    def __init__(self, columns: list[np.ndarray]):
        self.step_type, self.reward, self.discount, *self.leaves = columns
