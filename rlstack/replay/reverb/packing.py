"""A step as one row of bytes.

Reverb's cost is by column and item, not by byte: an item of nine small columns is written at a
third, and sampled at a third, of the rate of the same bytes in one column (13k against 37k and
23k against 78k items a second, two steps of CartPole, two cores). So every step is packed into one
row: the environment's id, then the leaves, large ones last. Rows are read by views, not parsed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.types import Trajectory, Transition

LARGE = 1024  # bytes from which on a leaf is copied by itself, item by item, rather than in between
_BUFFERS = 2  # batches handed out that stay as they are


class _Field(NamedTuple):
    """Where a leaf lies in a row."""

    offset: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Views the leaf in rows ``[n, m, step_bytes]`` as ``[n, m, ...]``."""
        shape, strides = rows.shape[:2] + self.shape, rows.strides[:2] + self.strides
        return np.ndarray(shape, self.dtype, rows, self.offset, strides)


def _field(offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> _Field:
    leaf = np.empty(shape, dtype)
    return _Field(offset, leaf.nbytes, dtype, shape, leaf.strides)


class Packing:
    """How the steps of one kind of transition are packed."""

    def __init__(self, spec: Transition):
        """Lays out a row.

        Args:
          spec: shapes and dtypes of one environment's step, without the batch axis, as
            `rlstack.acting.actor.transition_spec` gives them.
        """
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(spec)
        self._names = [jax.tree_util.keystr(path) for path, _ in paths]
        leaves = [(np.dtype(leaf.dtype), tuple(leaf.shape)) for _, leaf in paths]
        if any(dtype.hasobject for dtype, _ in leaves):
            raise ValueError("ReverbReplayBuffer: the leaves of spec must be arrays of numbers.")
        sizes = [int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in leaves]
        # Small ones first, wide ones before narrow ones: so all are aligned.
        order = sorted(
            range(len(leaves)), key=lambda i: (sizes[i] >= LARGE, -leaves[i][0].itemsize)
        )
        offset = 8  # the environment's id
        fields: list[_Field | None] = [None] * len(leaves)
        self._small_bytes = offset
        for i in order:
            fields[i] = _field(offset, *leaves[i])
            offset += sizes[i]
            if sizes[i] < LARGE:
                self._small_bytes = offset
        self._fields = [field for field in fields if field is not None]
        self.step_bytes = -(-offset // 8) * 8
        self._env_id = _field(0, np.dtype(np.int64), ())
        self._buffers: dict[tuple[int, int], list[list[np.ndarray]]] = {}
        self._next_buffer = 0

    def leaves(self, transition: Transition, count: int) -> list:
        """Returns the leaves, checked to be one step of each of ``count`` environments.

        Raises:
          ValueError: structure, shape or dtype differ from the spec; names the leaf.
        """
        try:
            leaves = self._treedef.flatten_up_to(transition)
        except ValueError:
            self._refuse_structure(transition)
        fields = self._fields
        try:
            for leaf, field in zip(leaves, fields, strict=True):
                if leaf.shape != (count, *field.shape) or leaf.dtype != field.dtype:
                    break
            else:
                return leaves
        except AttributeError:  # numbers and lists, which become arrays
            if jax.tree_util.tree_structure(transition) != self._treedef:
                self._refuse_structure(transition)
        leaves = [np.asarray(leaf) for leaf in leaves]
        for name, leaf, field in zip(self._names, leaves, fields, strict=True):
            if leaf.shape != (count, *field.shape) or leaf.dtype != field.dtype:
                raise ValueError(
                    f"ReverbReplayBuffer.add: leaf {name} must be {field.dtype}"
                    f"{(count, *field.shape)}, a step of each of {count} environments as the spec "
                    f"has it; got {leaf.dtype}{leaf.shape}."
                )
        return leaves

    def _refuse_structure(self, transition: Transition) -> None:
        raise ValueError(
            f"ReverbReplayBuffer.add: a transition must have the structure of the spec, "
            f"{self._treedef}; got {jax.tree_util.tree_structure(transition)}."
        )

    def views(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the leaves of rows ``[n, m, step_bytes]`` as views ``[n, m, ...]``."""
        return [field.of(rows) for field in self._fields]

    def env_ids(self, rows: np.ndarray) -> np.ndarray:
        """Returns the environments' ids of rows as a view ``[n, m]`` int64."""
        return self._env_id.of(rows)

    def head(self, item: np.ndarray, context: int = 0) -> tuple[int, int]:
        """Returns the environment's id and the params version of an item ``[T+1, step_bytes]``.

        An item's first step may be the last of the item before, taken before the learner could
        answer that one. The second step is the first that is the item's own, after what the
        table's context puts before it.
        """
        second = item[context + 1 : context + 2, None]
        return int(self._env_id.of(second)[0, 0]), int(self._fields[-1].of(second)[0, 0])

    def tree(self, leaves: list[np.ndarray]) -> Trajectory:
        """Returns a batch's leaves as the tree that they are of."""
        return self._treedef.unflatten(leaves)

    def gather(self, items: list[np.ndarray], *, reuse: bool = True) -> list[np.ndarray]:
        """Copies items, ``[T+1, step_bytes]`` each, into a batch; returns its leaves.

        Args:
          items: of the batch.
          reuse: whether to write to the next of the reused batches, not to new memory.
        """
        shape = len(items[0]), len(items)
        if self._small_bytes == self.step_bytes:
            parts: list[Any] = items
        else:
            parts = [item[:, : self._small_bytes].tobytes() for item in items]
        # Joining bytes takes a twentieth of the time of np.stack.
        small = np.frombuffer(b"".join(parts), np.uint8).reshape(*shape[::-1], self._small_bytes)
        batch = self._buffer(shape) if reuse else self._new_batch(shape)
        for field, out in zip(self._fields, batch, strict=True):
            if field.nbytes < LARGE:
                out[...] = field.of(small).swapaxes(0, 1)
                continue
            raw = out.reshape(*shape, -1).view(np.uint8)
            for i, item in enumerate(items):
                raw[:, i] = item[:, field.offset : field.offset + field.nbytes]
        return batch

    def _buffer(self, shape: tuple[int, int]) -> list[np.ndarray]:
        buffers = self._buffers.get(shape)
        if buffers is None:
            buffers = self._buffers[shape] = [self._new_batch(shape) for _ in range(_BUFFERS)]
        self._next_buffer = (self._next_buffer + 1) % _BUFFERS
        return buffers[self._next_buffer]

    def _new_batch(self, shape: tuple[int, int]) -> list[np.ndarray]:
        return [np.empty((*shape, *field.shape), field.dtype) for field in self._fields]
