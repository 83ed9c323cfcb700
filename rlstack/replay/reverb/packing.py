"""Steps packed into rows of bytes, and batches made of packed items.

Reverb's cost grows with the number of columns and items, not with bytes. An item of nine small
columns is written and sampled at a third of the rate of the same bytes in one column: 13k instead
of 37k items a second written, and 23k instead of 78k sampled (two steps of CartPole, two cores). So
every step is packed into one row: the environment's id, then the leaves, with large leaves last.
Rows are read as views, without parsing. Start leaves (`rlstack.replay.storage`) of many bytes are a
second column, the *head* of an item: one row of them alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.memory import BUFFERS, leaf_bytes
from rlstack.replay.reverb.binding import DATA, KEY, PROBABILITY, TABLE_SIZE, RawItem
from rlstack.replay.storage import checked_leaves, start_steps
from rlstack.types import Trajectory, Transition

LARGE = 1024  # bytes; larger or equal leaves are copied separately, item by item
HEAD = DATA + 1  # the field of a raw item that is its head


class _Field(NamedTuple):
    """The place of a leaf in a row."""

    offset: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Returns a view of the leaf in rows ``[n, m, step_bytes]``, ``[n, m, ...]``."""
        shape, strides = rows.shape[:2] + self.shape, rows.strides[:2] + self.strides
        return np.ndarray(shape, self.dtype, rows, self.offset, strides)


def _field(offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> _Field:
    leaf = np.empty(shape, dtype)
    return _Field(offset, leaf.nbytes, dtype, shape, leaf.strides)


class Packing:
    """The layout of a row for one kind of transition.

    Attributes:
      step_bytes: bytes of a row.
      head_bytes: bytes of an item's head; 0 for items without one.
      head_step: the step of an item at which its head is taken.
    """

    def __init__(self, spec: Transition, *, with_head: bool = True):
        """Computes the layout.

        Args:
          spec: shapes and dtypes of one environment's step, without the batch axis, from
              `rlstack.acting.actor.transition_spec`.
          with_head: False for the layout of earlier versions, whose rows had all leaves.
        """
        flat, self._treedef = jax.tree_util.tree_flatten(spec)
        self._starts = start_steps(flat)
        size_of_starts = sum(leaf_bytes(flat[i]) for i in self._starts)
        self._apart = set(self._starts) if with_head and size_of_starts >= LARGE else set[int]()
        self.head_step = max(self._starts.values(), default=0)
        self._older = Packing(spec, with_head=False) if self._apart else None
        leaves = [(np.dtype(leaf.dtype), tuple(leaf.shape)) for leaf in flat]
        self._dtypes = [dtype for dtype, _ in leaves]
        if any(dtype.hasobject for dtype in self._dtypes):
            raise ValueError("ReverbReplayBuffer: the leaves of spec must be arrays of numbers.")
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in leaves]
        # Small leaves first, and wide dtypes before narrow ones, so that all leaves are aligned.
        order = sorted(
            range(len(leaves)), key=lambda i: (sizes[i] >= LARGE, -leaves[i][0].itemsize)
        )
        self.head_bytes = 0
        offset = 8  # the environment's id
        fields: list[_Field | None] = [None] * len(leaves)
        self._small_bytes = offset
        for i in order:
            if i in self._apart:
                fields[i] = _field(self.head_bytes, *leaves[i])
                self.head_bytes += sizes[i]
                continue
            fields[i] = _field(offset, *leaves[i])
            offset += sizes[i]
            if sizes[i] < LARGE:
                self._small_bytes = offset
        self._fields = [field for field in fields if field is not None]
        self.step_bytes, self.head_bytes = (-(-n // 8) * 8 for n in (offset, self.head_bytes))
        self._env_id = _field(0, np.dtype(np.int64), ())
        self._buffers: dict[tuple[int, int], list[list[np.ndarray]]] = {}
        self._next_buffer = 0

    def leaves(self, transition: Transition, count: int) -> list[np.ndarray]:
        """Returns the leaves; checks that they are one step of each of ``count`` environments.

        Raises:
          ValueError: structure, shape or dtype differ from the spec; the error names the leaf.
        """
        shapes = [(count, *field.shape) for field in self._fields]
        return checked_leaves(transition, self._treedef, shapes, self._dtypes)

    def views(self, rows: np.ndarray, heads: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of steps as views ``[n, m, ...]``.

        Args:
          rows: ``[n, m, step_bytes]``.
          heads: ``[n, m, head_bytes]``, what a head has of each of these steps.
        """
        return [
            field.of(heads if i in self._apart else rows) for i, field in enumerate(self._fields)
        ]

    def divided(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows ``[n, m, ...]`` that earlier versions stored as rows and heads."""
        assert self._older is not None
        shape = rows.shape[:2]
        made = [np.zeros((*shape, n), np.uint8) for n in (self.step_bytes, self.head_bytes)]
        self.env_ids(made[0])[...] = self.env_ids(rows)
        for view, old in zip(self.views(*made), self._older.views(rows, rows), strict=True):
            view[...] = old
        return made[0], made[1]

    def renewed(self, raw: RawItem) -> RawItem:
        """Returns an item with a head, if items have one: those of earlier versions do not."""
        if not self.head_bytes or len(raw) > HEAD:
            return raw
        rows, heads = self.divided(raw[DATA][None])
        return [*raw[:DATA], rows[0], heads[0, self.head_step]]

    def env_ids(self, rows: np.ndarray) -> np.ndarray:
        """Returns the environments' ids of rows as a view ``[n, m]`` int64."""
        return self._env_id.of(rows)

    def head(self, item: np.ndarray, context: int = 0) -> tuple[int, int]:
        """Returns the environment's id and the params version of an item ``[T+1, step_bytes]``.

        Consecutive items may share a step, which is then older than the other steps of the second
        item. So the version is read at the second step after the ``context`` steps.
        """
        second = item[context + 1 : context + 2, None]
        return int(self._env_id.of(second)[0, 0]), int(self._fields[-1].of(second)[0, 0])

    def tree(self, leaves: list[np.ndarray]) -> Trajectory:
        """Returns a batch of leaves as a trajectory; start leaves at one step, ``[1, B, ...]``."""
        leaves = list(leaves)
        for i in self._starts.keys() - self._apart:
            leaves[i] = leaves[i][self.head_step : self.head_step + 1]
        return self._treedef.unflatten(leaves)

    def gather(
        self, items: list[np.ndarray], heads: list[np.ndarray], *, reuse: bool = True
    ) -> list[np.ndarray]:
        """Copies items into a batch; returns its leaves.

        Args:
          items: the rows of the items, ``[T+1, step_bytes]`` each.
          heads: their heads, ``[head_bytes]`` each; empty if items have none.
          reuse: whether to write into one of two reused buffers instead of new memory.
        """
        shape = len(items[0]), len(items)
        parts: list[Any] = items  # buffers: arrays or bytes
        if self._small_bytes < self.step_bytes:
            parts = [item[:, : self._small_bytes].tobytes() for item in items]
        # Joining bytes is twenty times as fast as np.stack.
        small = np.frombuffer(b"".join(parts), np.uint8).reshape(*shape[::-1], self._small_bytes)
        batch = self._buffer(shape) if reuse else self._new_batch(shape)
        joined: list[Any] = heads
        of_heads = np.frombuffer(b"".join(joined), np.uint8).reshape(-1, 1, self.head_bytes or 1)
        for i, (field, out) in enumerate(zip(self._fields, batch, strict=True)):
            if i in self._apart or field.nbytes < LARGE:
                out[...] = field.of(of_heads if i in self._apart else small).swapaxes(0, 1)
                continue
            raw = out.reshape(*shape, -1).view(np.uint8)
            for column, item in enumerate(items):
                raw[:, column] = item[:, field.offset : field.offset + field.nbytes]
        return batch

    def _buffer(self, shape: tuple[int, int]) -> list[np.ndarray]:
        buffers = self._buffers.get(shape)
        if buffers is None:
            buffers = self._buffers[shape] = [self._new_batch(shape) for _ in range(BUFFERS)]
        self._next_buffer = (self._next_buffer + 1) % BUFFERS
        return buffers[self._next_buffer]

    def _new_batch(self, shape: tuple[int, int]) -> list[np.ndarray]:
        lengths = [1 if i in self._apart else shape[0] for i in range(len(self._fields))]
        pairs = zip(lengths, self._fields, strict=True)
        return [np.empty((n, shape[1], *field.shape), field.dtype) for n, field in pairs]


class FifoItem(RawItem):
    """A fifo's item, with the numbers that decide when it is returned."""

    __slots__ = ("env_id", "times", "version")
    env_id: int
    version: int  # version of the params that produced it
    times: int  # number of batches that contained it


def fifo_item(packing: Packing, cfg: ReplayConfig, raw: RawItem, times: int = 0) -> FifoItem:
    """Returns a fifo's item, with its environment and params version read from its data."""
    item = FifoItem(packing.renewed(raw))
    item.env_id, item.version = packing.head(item[DATA], cfg.context)
    item.times = times
    return item


class DrawnBatch(NamedTuple):
    """A batch of items, without the importance weights."""

    keys: np.ndarray  # [B] uint64
    relative_probs: np.ndarray | None  # [B] N * P(i), relative to uniform; None: all equal
    leaves: list[np.ndarray]  # leaves of the trajectory, [T+1, B, ...]

    def cut(self, start: int, stop: int) -> DrawnBatch:
        """Returns some of the items, as views."""
        probs = None if self.relative_probs is None else self.relative_probs[start:stop]
        return DrawnBatch(
            self.keys[start:stop], probs, [leaf[:, start:stop] for leaf in self.leaves]
        )


def make_batch(
    packing: Packing, items: list[RawItem], *, prioritized: bool, reuse: bool = True
) -> DrawnBatch:
    """Makes a batch of items.

    Args:
      packing: the packing of the items.
      items: the items, as Reverb returns them.
      prioritized: whether items were drawn by priority; then weights need ``relative_probs``.
      reuse: whether the leaves may be in memory that a later batch reuses.
    """
    keys, probs = _column(items, KEY, np.uint64), None
    if prioritized:
        probs = _column(items, PROBABILITY, np.float64) * _column(items, TABLE_SIZE, np.float64)
    items = [packing.renewed(item) for item in items]
    heads = [item[HEAD] for item in items] if packing.head_bytes else []
    leaves = packing.gather([item[DATA] for item in items], heads, reuse=reuse)
    return DrawnBatch(keys, probs, leaves)


def _column(items: list[RawItem], index: int, dtype: type) -> np.ndarray:
    """Returns one field of each item, [B]."""
    return np.fromiter([item[index] for item in items], dtype, len(items))


def join_batches(parts: list[DrawnBatch]) -> DrawnBatch:
    """Joins several batches into one."""
    if len(parts) == 1:
        return parts[0]
    probs = [part.relative_probs for part in parts if part.relative_probs is not None]
    leaves = [
        np.concatenate(leaf, axis=1) for leaf in zip(*(part.leaves for part in parts), strict=True)
    ]
    keys = np.concatenate([part.keys for part in parts])
    return DrawnBatch(keys, np.concatenate(probs) if probs else None, leaves)
