"""Storage of steps: one ring of rows for each leaf of a transition.

Step ``g`` of an environment is stored in row ``g % rows``. Items are windows of steps and need no
additional memory. If all windows start at multiples of a period that divides ``rows`` (fifo), a few
rows at the end repeat the first rows. So a window never wraps around and can be returned as a view.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.memory import BUFFERS, check_memory, reader_bytes, ring_shape, step_bytes
from rlstack.types import PyTree, Trajectory, Transition

_SIZES = 4  # number of sizes of batches with buffers that are kept
_MOST_BUFFERS = 8  # per size, if earlier batches are still referenced
_WORDS, _BYTES = np.dtype(np.uint64), np.dtype(np.uint8)
_LARGE = 1 << 16  # bytes of a row from which `copy_words` is at least as fast as an assignment


class StepRing:
    """Rings ``[rows + mirror, num_envs, ...]``, allocated at the first step or set by ``use``."""

    def __init__(self, cfg: ReplayConfig, num_envs: int):
        self._cfg, self._num_envs = cfg, num_envs
        self._length = cfg.unroll_length + 1
        self.rows, self._mirror, _ = ring_shape(cfg, num_envs)
        # Offsets of a window's rows in the flat ring.
        self._offsets = np.arange(self._length)[:, None] * num_envs
        self._treedef: jax.tree_util.PyTreeDef | None = None
        self._rings: list[np.ndarray] = []
        self._flat: list[np.ndarray] = []
        self._written: list[np.ndarray] = []  # the rings, those with large rows as words
        self._small: list[int] = []  # the rings with small rows
        self._large: list[int] = []  # and those with large ones, the largest last
        self._dtypes: list[np.dtype] = []
        self._shapes: list[tuple[int, ...]] = []  # shapes of the leaves for all environments
        self._buffers: dict[tuple[int, ...], list[list[np.ndarray]]] = {}
        self._last_buffer = 0

    @property
    def step_type(self) -> np.ndarray:
        """Ring of step types."""
        return self._rings[0]  # the first field of the first field

    @property
    def reward(self) -> np.ndarray:
        """Ring of rewards."""
        return self._rings[1]  # the second field of the first field

    @property
    def params_version(self) -> np.ndarray:
        """Ring of params versions."""
        return self._rings[-1]  # the last field

    def leaves(self, transition: Transition, count: int) -> list[np.ndarray]:
        """Returns the leaves; checks that they are ``count`` steps like the stored ones.

        Raises:
          ValueError: structure, shape or dtype differ; the error names the leaf.
        """
        if self._treedef is None:
            self._allocate_like(transition, count)
            assert self._treedef is not None
        shapes = self._shapes
        if count != self._num_envs:
            shapes = [(count, *shape[1:]) for shape in shapes]
        return checked_leaves(transition, self._treedef, shapes, self._dtypes)

    def allocate(self, spec: Transition) -> None:
        """Allocates the rings for steps of these shapes and dtypes, without the batch axis.

        Raises:
          ValueError: there is not enough memory.
        """
        leaves, treedef = jax.tree_util.tree_flatten(spec)
        rows = self.rows + self._mirror
        step = step_bytes((x.shape, x.dtype) for x in leaves)
        others = reader_bytes(self._cfg, self._num_envs, step)
        check_memory(rows * self._num_envs * step + others, "InProcessReplay")
        # Zeroed memory takes no space until it is written.
        self._set_rings(
            treedef, [np.zeros((rows, self._num_envs, *x.shape), x.dtype) for x in leaves]
        )

    def _allocate_like(self, transition: Transition, count: int) -> None:
        """Allocates the rings for steps like the first transition."""
        paths, treedef = jax.tree_util.tree_flatten_with_path(transition)
        arrays = [np.asarray(leaf) for _, leaf in paths]
        for (path, _), array in zip(paths, arrays, strict=True):
            if array.shape[:1] != (count,) or array.dtype.hasobject:
                raise ValueError(
                    f"ReplayBuffer.add: leaf {jax.tree_util.keystr(path)} must be an array of "
                    f"numbers with a first axis of {count} environments; got shape {array.shape}, "
                    f"dtype {array.dtype}."
                )
        self.allocate(treedef.unflatten([array[0] for array in arrays]))

    def use(self, spec: Transition, rings: list[np.ndarray]) -> None:
        """Uses given rings ``[rows, num_envs, ...]`` with any number of rows, without a mirror."""
        self.rows, self._mirror = len(rings[0]), 0
        self._set_rings(jax.tree_util.tree_structure(spec), rings)

    def _set_rings(self, treedef: jax.tree_util.PyTreeDef, rings: list[np.ndarray]) -> None:
        self._treedef, self._rings = treedef, rings
        self._flat = [ring.reshape((-1, *ring.shape[2:])) for ring in rings]
        by_size = sorted(range(len(rings)), key=lambda i: rings[i].nbytes)
        self._small = [i for i in by_size if rings[i][0].nbytes < _LARGE]
        self._large = by_size[len(self._small) :]
        self._written = list(rings)
        for i in self._large:
            self._written[i] = as_words(rings[i])
        self._dtypes = [ring.dtype for ring in rings]
        self._shapes = [ring.shape[1:] for ring in rings]

    def write_all(self, step: int, leaves: list[np.ndarray]) -> None:
        """Writes one step of every environment, all at the same step."""
        row = step % self.rows
        self._write_row(row, self._written, leaves)
        if row < self._mirror:
            self._write_row(row + self.rows, self._written, leaves)

    def write(self, steps: np.ndarray, env_ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Writes one step of each of ``env_ids``, each at its own step."""
        rows = steps % self.rows
        where = rows * self._num_envs + env_ids
        for flat, leaf in zip(self._flat, leaves, strict=False):
            flat[where] = leaf
        if self._mirror and (again := np.flatnonzero(rows < self._mirror)).size:
            where = where[again] + self.rows * self._num_envs
            for flat, leaf in zip(self._flat, leaves, strict=False):
                flat[where] = np.asarray(leaf)[again]

    def columns(self, envs: slice) -> list[np.ndarray]:
        """Returns views of consecutive environments, for `write_columns`."""
        return [ring[:, envs] for ring in self._written]

    def write_columns(self, step: int, columns: list[np.ndarray], leaves: list[np.ndarray]) -> None:
        """Writes one step of the environments of ``columns``, all at the same step; not mirrored.

        Args:
          step: the number of the step, the same for all these environments.
          columns: result of the method of this name.
          leaves: the steps, ``[n, ...]``.
        """
        self._write_row(step % self.rows, columns, leaves)

    def _write_row(self, row: int, rings: list[np.ndarray], leaves: list[np.ndarray]) -> None:
        for i in self._small:
            rings[i][row] = leaves[i]
        for i in self._large:
            copy_words(rings[i][row], leaves[i])

    def pick(self, rows: np.ndarray, env_ids: np.ndarray) -> PyTree:
        """Returns copies of some rows of some environments."""
        assert self._treedef is not None
        return self._treedef.unflatten([ring[rows, env_ids] for ring in self._rings])

    def put(self, rows: np.ndarray, env_ids: np.ndarray, tree: PyTree, source: np.ndarray) -> None:
        """Writes rows ``source`` of rings like these into ``rows``, for each of ``env_ids``."""
        assert self._treedef is not None
        for ring, saved in zip(self._rings, self._treedef.flatten_up_to(tree), strict=True):
            ring[rows, env_ids] = np.asarray(saved)[source, env_ids]

    def view(self, start: int, first_env: int, count: int) -> Trajectory:
        """Returns windows ``[T+1, count, ...]`` of consecutive environments as views."""
        rows = slice(start % self.rows, start % self.rows + self._length)
        envs = slice(first_env, first_env + count)
        assert rows.stop <= self.rows + self._mirror and self._treedef is not None
        return self._treedef.unflatten([ring[rows, envs] for ring in self._rings])

    def gather(self, starts: np.ndarray, env_ids: np.ndarray) -> Trajectory:
        """Copies windows into a reused buffer.

        Args:
          starts: first steps of the windows, ``[B]``, or ``[n, B]`` for several batches.
          env_ids: the environments of the windows, in the same shape.

        Returns:
          The windows, ``[T+1, B, ...]`` or ``[n, T+1, B, ...]``.
        """
        assert self._treedef is not None
        indices = self._indices(starts, env_ids)
        batch = self._buffer(starts.shape)
        for flat, out in zip(self._flat, batch, strict=True):
            # With any mode except "raise", it writes directly into `out`.
            flat.take(indices, axis=0, out=out, mode="wrap")
        return self._treedef.unflatten(batch)

    def _indices(self, starts: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the indices of windows in `_flat`, ``[..., T+1, B]``.

        An index past the end stands for a row at the beginning, as in ``take`` with mode "wrap".
        """
        first = starts % self.rows * self._num_envs + env_ids
        return first[..., None, :] + self._offsets

    def gather_again(
        self, trajectory: Trajectory, columns: np.ndarray, starts: np.ndarray, env_ids: np.ndarray
    ) -> None:
        """Replaces some windows of the last result of ``gather`` with others.

        Args:
          trajectory: the last result of ``gather``; it is changed in place.
          columns: the windows to replace, counted over all batches, ``[k]``.
          starts: first steps of the new windows, ``[k]``.
          env_ids: environments of the new windows, ``[k]``.
        """
        assert self._treedef is not None
        indices = self._indices(starts, env_ids).T
        width = trajectory.params_version.shape[-1]
        batch, column = np.divmod(columns, width)
        for flat, out in zip(self._flat, self._treedef.flatten_up_to(trajectory), strict=True):
            batches = out.reshape((-1, self._length, width, *flat.shape[1:]))
            batches[batch, :, column] = flat.take(indices, axis=0, mode="wrap")

    def _buffer(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        """Returns arrays that hold the result of `gather` for ``starts`` of this shape."""
        buffers = self._buffers.get(shape)
        if buffers is None:
            # Rounds have several sizes. A batch of a discarded size stays valid while referenced.
            while len(self._buffers) >= _SIZES:
                del self._buffers[next(iter(self._buffers))]
            buffers = self._buffers[shape] = [self._new_buffer(shape) for _ in range(BUFFERS)]
        # An unreferenced buffer is reused immediately, while it is still in the cache.
        unused = (i for i, arrays in enumerate(buffers) if _references(arrays) == _UNUSED)
        chosen = next(unused, None)
        if chosen is None and len(buffers) < _MOST_BUFFERS:  # several readers hold one each
            buffers.append(self._new_buffer(shape))
            chosen = len(buffers) - 1
        elif chosen is None:
            chosen = (self._last_buffer + 1) % len(buffers)
        self._last_buffer = chosen
        return buffers[chosen]

    def _new_buffer(self, shape: tuple[int, ...]) -> list[np.ndarray]:
        windows = *shape[:-1], self._length, shape[-1]
        return [np.empty((*windows, *f.shape[1:]), f.dtype) for f in self._flat]

    def save(self, steps: int) -> PyTree:
        """Returns a copy of the rows that ``steps`` steps have filled, () for no steps."""
        if self._treedef is None:
            return ()
        used = None if steps > self.rows else steps
        return self._treedef.unflatten([ring[:used].copy() for ring in self._rings])

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned.

        Raises:
          ValueError: the sizes differ from this buffer's.
        """
        saved, treedef = jax.tree_util.tree_flatten(tree)
        self._buffers, self._treedef = {}, None
        rings = []
        for part in saved:
            ring = np.zeros((self.rows + self._mirror, self._num_envs, *part.shape[2:]), part.dtype)
            if part.shape[0] > len(ring) or part.shape[1] != self._num_envs:
                raise ValueError(
                    f"ReplayBuffer.load: this config holds {ring.shape[:2]} (steps, environments); "
                    f"got a saved {part.shape[:2]}. Load into an equal config."
                )
            ring[: len(part)] = part
            rings.append(ring)
        if rings:
            self._set_rings(treedef, rings)


def checked_leaves(
    transition: Transition,
    treedef: jax.tree_util.PyTreeDef,
    shapes: list[tuple[int, ...]],
    dtypes: list[np.dtype],
) -> list[np.ndarray]:
    """Returns the leaves of one step of some environments; numbers and lists become arrays.

    Raises:
      ValueError: structure, shape or dtype are others; the error names the leaf.
    """

    def refuse_structure() -> NoReturn:
        raise ValueError(
            f"ReplayBuffer.add: every transition must have the structure of the first one or of "
            f"the spec, {treedef}; got {jax.tree_util.tree_structure(transition)}."
        )

    try:
        leaves = treedef.flatten_up_to(transition)
    except ValueError:
        refuse_structure()
    try:
        if [x.shape for x in leaves] == shapes and [x.dtype for x in leaves] == dtypes:
            return leaves
    except AttributeError:  # plain numbers and lists, or a deeper structure
        if jax.tree_util.tree_structure(transition) != treedef:
            refuse_structure()
    paths, _ = jax.tree_util.tree_flatten_with_path(transition)
    leaves = [np.asarray(leaf) for leaf in leaves]
    for (path, _), leaf, shape, dtype in zip(paths, leaves, shapes, dtypes, strict=True):
        if leaf.shape != shape or leaf.dtype != dtype:
            raise ValueError(
                f"ReplayBuffer.add: leaf {jax.tree_util.keystr(path)} must be {dtype}{shape}, one "
                f"step of each environment like the first one added or the spec; got "
                f"{leaf.dtype}{leaf.shape}."
            )
    return leaves


def as_words(ring: np.ndarray) -> np.ndarray:
    """Returns a view ``[rows, n, words]`` of a ring, in bytes if an item does not fill words."""
    items = ring.reshape((*ring.shape[:2], -1))
    return items.view(_BYTES if items[0, 0].nbytes % _WORDS.itemsize else _WORDS)


def copy_words(target: np.ndarray, source: np.ndarray) -> None:
    """Copies an array into a row of words, as fast from any address.

    The C library copies large arrays by one instruction. On some processors (AMD Zen 3 and 4, with
    glibc before 2.39) it takes two to four times as long if both addresses differ modulo 64. The
    loops of numpy's functions have no such instruction. The one for ``x & x``, which is x, is the
    fastest of them.

    Args:
      target: ``[n, words]``, a row of what `as_words` returns, or some columns of it.
      source: ``[n, ...]``, of the ring's dtype and shape.
    """
    words = np.ascontiguousarray(source).reshape((len(target), -1)).view(target.dtype)
    np.bitwise_and(words, words, target)


def _references(arrays: list[np.ndarray]) -> int:
    """Returns the largest reference count of these arrays."""
    return max(map(sys.getrefcount, arrays), default=0)


_UNUSED = _references([np.empty(0)])
