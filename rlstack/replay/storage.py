"""Storage of steps: one ring of rows for each leaf of a transition.

Step ``g`` of an environment is stored in row ``g % rows``. Items are windows of steps and need no
additional memory. If all windows start at multiples of a period that divides ``rows`` (fifo), a few
rows at the end repeat the first rows. So a window never wraps around and can be returned as a view.

Learners read some leaves, the *start leaves*, at the first step of a window only. Their specs are
of `StartSpec`. The ring of a start leaf has one row for every ``period`` steps, the step at which
windows may start, and a window has one row of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.memory import (
    BUFFERS,
    RingShape,
    check_memory,
    ring_shape,
    rows_of,
    spec_bytes,
)
from rlstack.types import PyTree, StartSpec, TimeStep, Trajectory, Transition

_SIZES = 4  # number of sizes of batches with buffers that are kept
_MOST_BUFFERS = 8  # per size, if earlier batches are still referenced
_WORDS, _BYTES = np.dtype(np.uint64), np.dtype(np.uint8)
_NEVER = np.iinfo(np.int64).min  # no step has this number
_LARGE = 1 << 16  # bytes of a row from which `copy_words` is at least as fast as an assignment


class StepRing:
    """Rings ``[rows + mirror, num_envs, ...]``, allocated at the first step or set by ``use``."""

    def __init__(self, cfg: ReplayConfig, num_envs: int):
        self._cfg, self._num_envs = cfg, num_envs
        self._length, self._period = cfg.unroll_length + 1, cfg.step_period
        self.rows, self._mirror, _ = ring_shape(cfg, num_envs)
        # Offsets of a window's rows in the flat ring.
        self._offsets = np.arange(self._length)[:, None] * num_envs
        self._treedef: jax.tree_util.PyTreeDef | None = None
        self._rings: list[np.ndarray] = []
        self._flat: list[np.ndarray] = []
        self._written: list[np.ndarray] = []  # the rings, those with large rows as words
        self._small: list[int] = []  # the rings that are written at every step, with small rows
        self._large: list[int] = []  # and those with large ones, the largest last
        self._every: list[int] = []  # the rings of leaves that are read at every step
        self._once: list[int] = []  # the rings of start leaves
        self._thin: list[int] = []  # those of them that are not written at every step
        self._start_rows, self._start_step = 1, 0  # rows of these, and `StartSpec.step`
        self._dtypes: list[np.dtype] = []
        self._shapes: list[tuple[int, ...]] = []  # shapes of the leaves for all environments
        self._buffers: dict[tuple[int, ...], list[list[np.ndarray]]] = {}
        self._last_buffer = 0
        self._is_shared = False  # whether others write to the rings
        # Of leaves that the reader of shared rings replaced: new values, and of which steps.
        self._replaced: dict[int, tuple[np.ndarray, np.ndarray]] = {}

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
        num_envs, sizes = self._num_envs, (self._period, self.rows, self._mirror)
        check_memory(spec_bytes(self._cfg, spec, num_envs), "InProcessReplay")
        # Zeroed memory takes no space until it is written.
        shapes = [(rows_of(x, *sizes), num_envs, *x.shape) for x in leaves]
        made = [np.zeros(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True)]
        self._set_rings(treedef, made, start_steps(leaves))

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
        """Uses given rings ``[rows, num_envs, ...]`` with any number of rows, without a mirror.

        Those of start leaves have ``rows_of`` their rows.
        """
        self.rows, self._mirror, self._is_shared = len(rings[0]), 0, True
        leaves, treedef = jax.tree_util.tree_flatten(spec)
        self._set_rings(treedef, rings, start_steps(leaves))

    def _set_rings(
        self, treedef: jax.tree_util.PyTreeDef, rings: list[np.ndarray], starts: dict[int, int]
    ) -> None:
        self._treedef, self._rings = treedef, rings
        self._flat = [ring.reshape((-1, *ring.shape[2:])) for ring in rings]
        self._start_rows = len(rings[next(iter(starts))]) if starts else 1
        self._start_step = max(starts.values(), default=0)
        self._once = list(starts)
        self._every = [i for i in range(len(rings)) if i not in starts]
        self._thin = self._once if self._period > 1 or self._mirror else []
        by_size = sorted(range(len(rings)), key=lambda i: rings[i].nbytes)
        written = [i for i in by_size if i not in self._thin]
        self._small = [i for i in written if rings[i][0].nbytes < _LARGE]
        self._large = written[len(self._small) :]
        self._written = [ring if ring[0].nbytes < _LARGE else as_words(ring) for ring in rings]
        self._dtypes = [ring.dtype for ring in rings]
        self._shapes = [ring.shape[1:] for ring in rings]

    def write_all(self, step: int, leaves: list[np.ndarray]) -> None:
        """Writes one step of every environment, all at the same step."""
        row = step % self.rows
        self._write_row(row, self._written, leaves)
        if row < self._mirror:
            self._write_row(row + self.rows, self._written, leaves)
        if self._thin and self._may_start(step):
            self._write_start(step, self._written, leaves)

    def write(self, steps: np.ndarray, env_ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Writes one step of each of ``env_ids``, each at its own step."""
        rows = steps % self.rows
        where = rows * self._num_envs + env_ids
        for i in [*self._small, *self._large]:
            self._flat[i][where] = leaves[i]
        if self._mirror and (again := np.flatnonzero(rows < self._mirror)).size:
            where = where[again] + self.rows * self._num_envs
            for i in self._every:
                self._flat[i][where] = np.asarray(leaves[i])[again]
        if self._thin and (due := np.flatnonzero(self._may_start(steps))).size:
            where = self._start_row(steps[due]) * self._num_envs + env_ids[due]
            for i in self._thin:
                self._flat[i][where] = np.asarray(leaves[i])[due]

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
        if self._thin and self._may_start(step):
            self._write_start(step, columns, leaves)

    def _write_row(self, row: int, rings: list[np.ndarray], leaves: list[np.ndarray]) -> None:
        for i in self._small:
            rings[i][row] = leaves[i]
        for i in self._large:
            copy_words(rings[i][row], leaves[i])

    def _write_start(self, step: int, rings: list[np.ndarray], leaves: list[np.ndarray]) -> None:
        row = self._start_row(step)
        for i in self._thin:
            if self._rings[i][0].nbytes < _LARGE:
                rings[i][row] = leaves[i]
            else:
                copy_words(rings[i][row], leaves[i])

    def _may_start(self, steps: Any) -> Any:
        """Whether the start leaves of steps are stored."""
        return steps % self._period == self._start_step % self._period

    def _start_row(self, steps: Any) -> Any:
        """Returns the rows of stored steps in the rings of start leaves."""
        return steps // self._period % self._start_rows

    def view(self, start: int, first_env: int, count: int) -> Trajectory:
        """Returns windows ``[T+1, count, ...]`` of consecutive environments as views."""
        rows = slice(start % self.rows, start % self.rows + self._length)
        envs = slice(first_env, first_env + count)
        assert rows.stop <= self.rows + self._mirror and self._treedef is not None
        views = [ring[rows, envs] for ring in self._rings]
        if self._once:
            row = self._start_row(start + self._start_step)
            for i in self._once:
                views[i] = self._rings[i][row : row + 1, envs]
        return self._treedef.unflatten(views)

    def gather(self, starts: np.ndarray, env_ids: np.ndarray) -> Trajectory:
        """Copies windows into a reused buffer.

        Args:
          starts: first steps of the windows, ``[B]``, or ``[n, B]`` for several batches.
          env_ids: the environments of the windows, in the same shape.

        Returns:
          The windows, ``[T+1, B, ...]`` or ``[n, T+1, B, ...]``; of start leaves ``[1, B, ...]`` or
          ``[n, 1, B, ...]``.
        """
        assert self._treedef is not None
        batch = self._buffer(starts.shape)
        indices = self._indices(starts, env_ids)
        for i in self._every:
            # With any mode except "raise", it writes directly into `out`.
            self._flat[i].take(indices, axis=0, out=batch[i], mode="wrap")
        if self._once:
            indices = self._start_indices(starts, env_ids)
            for i in self._once:
                self._flat[i].take(indices, axis=0, out=batch[i], mode="wrap")
        if self._replaced:
            steps = starts[..., None, :] + np.arange(self._length)[:, None]
            for i in self._replaced:
                self._put_replaced(i, batch[i], steps, env_ids[..., None, :])
        return self._treedef.unflatten(batch)

    def write_output(
        self,
        where: str,
        starts: np.ndarray,
        env_ids: np.ndarray,
        output: PyTree,
        columns: np.ndarray,
    ) -> None:
        """Replaces stored agent outputs.

        Args:
          where: the buffer's name, for messages.
          starts: the first step of each column, ``[B]``.
          env_ids: the environment of each, ``[B]``.
          output: like the agent's output, ``[n, B, ...]``, with None for leaves that stay.
          columns: the columns to write.

        Raises:
          ValueError: a leaf has other shapes or another dtype than the stored ones.
        """
        assert self._treedef is not None
        before, structure, *_ = self._treedef.children()
        for i, leaf in enumerate(structure.flatten_up_to(output), before.num_leaves):
            if leaf is None:
                continue
            values, shape = np.asarray(leaf), self._rings[i].shape[2:]
            least = (self._length - self._cfg.context, len(starts), *shape)
            if values.shape != least or values.dtype != self._dtypes[i]:
                raise ValueError(
                    f"{where}.write_back: leaf {i - before.num_leaves} of the agent's output must "
                    f"be {self._dtypes[i]}{least}, as it is stored; got "
                    f"{values.dtype}{values.shape}."
                )
            steps = starts[columns] + np.arange(len(values))[:, None]
            at = steps % self.rows, np.broadcast_to(env_ids[columns], steps.shape)
            if self._is_shared:
                # A writer may overwrite a row at any time, so the reader keeps its own values.
                if i not in self._replaced:
                    ring = self._rings[i]
                    self._replaced[i] = np.empty_like(ring), np.full(ring.shape[:2], _NEVER)
                own, numbers = self._replaced[i]
                own[at], numbers[at] = values[:, columns], steps
            else:
                self._rings[i][at] = values[:, columns]

    def _put_replaced(
        self, leaf: int, values: np.ndarray, steps: np.ndarray, env_ids: np.ndarray
    ) -> None:
        """Writes what `write_output` kept for these steps into copies of the ring's values."""
        if leaf not in self._replaced:
            return
        own, numbers = self._replaced[leaf]
        steps, env_ids = np.broadcast_arrays(steps, env_ids)
        rows = steps % self.rows
        there = numbers[rows, env_ids] == steps
        values[there] = own[rows[there], env_ids[there]]

    def timesteps(self, steps: np.ndarray, env_ids: np.ndarray) -> TimeStep:
        """Returns copies of single steps of environments, in the shape of the arguments."""
        assert self._treedef is not None
        structure = self._treedef.children()[0]  # the first field
        where = steps % self.rows * self._num_envs + env_ids
        leaves = [flat.take(where, axis=0) for flat in self._flat[: structure.num_leaves]]
        return structure.unflatten(leaves)

    def _indices(self, starts: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the indices of windows in `_flat`, ``[..., T+1, B]``.

        An index past the end stands for a row at the beginning, as in ``take`` with mode "wrap".
        """
        first = starts % self.rows * self._num_envs + env_ids
        return first[..., None, :] + self._offsets

    def _start_indices(self, starts: np.ndarray, env_ids: np.ndarray) -> np.ndarray:
        """Returns the indices of windows in the rings of start leaves, ``[..., 1, B]``."""
        rows = self._start_row(starts + self._start_step)
        return (rows * self._num_envs + env_ids)[..., None, :]

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
        width = trajectory.params_version.shape[-1]
        batch, column = np.divmod(columns, width)
        indices, at_starts = self._indices(starts, env_ids), self._start_indices(starts, env_ids)
        for i, out in enumerate(self._treedef.flatten_up_to(trajectory)):
            flat, rows = self._flat[i], at_starts if i in self._once else indices
            batches = out.reshape((-1, len(rows), width, *flat.shape[1:]))
            values = flat.take(rows.T, axis=0, mode="wrap")
            self._put_replaced(i, values, starts[:, None] + np.arange(len(rows)), env_ids[:, None])
            batches[batch, :, column] = values

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
        lengths = [self._length] * len(self._flat)
        for i in self._once:
            lengths[i] = 1
        windows = [(*shape[:-1], length, shape[-1]) for length in lengths]
        pairs = zip(windows, self._flat, strict=True)
        return [np.empty((*window, *f.shape[1:]), f.dtype) for window, f in pairs]

    def save(self, steps: int) -> PyTree:
        """Returns a copy of the rows that ``steps`` steps have filled, () for no steps."""
        if self._treedef is None:
            return ()
        used = [None if steps > self.rows else steps] * len(self._rings)
        for i in self._once:
            used[i] = None if steps > self.rows else -(-steps // self._period)
        pairs = zip(self._rings, used, strict=True)
        return self._treedef.unflatten([ring[:count].copy() for ring, count in pairs])

    def load(self, tree: PyTree, seen: np.ndarray) -> None:
        """Restores what ``save`` returned.

        Args:
          tree: the result of ``save``.
          seen: number of steps of each environment at that time, ``[num_envs]``.

        Raises:
          ValueError: the sizes differ from this buffer's.
        """
        saved, treedef = jax.tree_util.tree_flatten(tree)
        starts = dict.fromkeys(self._once, self._start_step)
        self._buffers, self._treedef = {}, None
        rows = self.rows + self._mirror
        self._check_saved(saved, starts, rows)
        rings = []
        for i, part in enumerate(saved):
            length = self._start_rows if i in starts else rows
            ring = np.zeros((length, self._num_envs, *part.shape[2:]), part.dtype)
            if i not in starts:
                ring[: len(part)] = part
            rings.append(ring)
        if rings:
            self._set_rings(treedef, rings, starts)
            self._put_starts(saved, seen, self.rows)

    def pick(self, seen: np.ndarray, sizes: RingShape) -> PyTree:
        """Returns copies of the steps that a ring of other sizes has, in its rows.

        Args:
          seen: number of steps of each environment, ``[num_envs]``.
          sizes: the sizes of the other ring.
        """
        assert self._treedef is not None
        envs, newest = np.arange(self._num_envs), int(seen.max())
        used = sizes.rows if newest > sizes.rows else newest
        steps = _latest(seen, np.arange(used)[:, None], sizes.rows)
        if newest > sizes.rows:
            steps = np.concatenate([steps, steps[: sizes.mirror]])
        where = np.maximum(steps, 0) % self.rows
        saved: list[np.ndarray] = [np.empty(0)] * len(self._rings)
        for i in self._every:
            saved[i] = self._rings[i][where, envs]
            self._put_replaced(i, saved[i], steps, envs)
        if self._once:
            rows = np.arange(-(-used // self._period))[:, None]
            starts = _latest(self._starts_in(seen), rows, -(-sizes.rows // self._period))
            where = np.maximum(starts, 0) % self._start_rows
            for i in self._once:
                saved[i] = self._rings[i][where, envs]
        return self._treedef.unflatten(saved)

    def put(self, tree: PyTree, seen: np.ndarray, sizes: RingShape) -> None:
        """Restores what ``pick``, or ``save`` of a ring of other sizes, returned.

        Args:
          tree: the result of ``pick`` or ``save``.
          seen: number of steps of each environment at that time, ``[num_envs]``.
          sizes: the sizes of the other ring.

        Raises:
          ValueError: the saved rows are not those of a ring of these sizes.
        """
        assert self._treedef is not None
        saved = [np.asarray(x) for x in jax.tree_util.tree_leaves(tree)]
        self._check_saved(saved, self._once, sizes.rows + sizes.mirror)
        if not saved:
            return
        saved = self._treedef.flatten_up_to(tree)
        self._replaced = {}
        wanted = _latest(seen, np.arange(self.rows)[:, None], self.rows)
        there = (wanted >= 0) & (wanted >= seen - sizes.rows)
        rows, envs = np.nonzero(there)
        source = wanted[there] % sizes.rows
        for i in self._every:
            self._rings[i][rows, envs] = np.asarray(saved[i])[source, envs]
        self._put_starts(saved, seen, sizes.rows)

    def _check_saved(self, saved: list[np.ndarray], starts: Collection[int], most: int) -> None:
        """Checks the sizes of saved rings; ``starts`` are the leaves stored at starts alone."""
        for i, part in enumerate(saved):
            if part.shape[0] > most or part.shape[1] != self._num_envs:
                raise ValueError(
                    f"ReplayBuffer.load: this config holds up to {most} steps of {self._num_envs} "
                    f"environments; got a saved {part.shape[:2]}. Load into an equal config."
                )
            if i not in starts and len(part) < len(saved[0]):
                raise ValueError(
                    f"ReplayBuffer.load: every leaf must be saved at all {len(saved[0])} steps; "
                    f"got one at {len(part)}, the starts of items, because the agent that saved it "
                    "reads its state only there. Set reads_first_state = True in the agent's class "
                    "again, or start without the saved replay."
                )

    def _put_starts(self, saved: list[np.ndarray], seen: np.ndarray, rows: int) -> None:
        """Writes the start leaves of a ring that has ``rows`` rows of every step.

        Earlier versions saved these leaves at every step.
        """
        if not self._once:
            return
        starts = self._starts_in(seen)
        wanted = _latest(starts, np.arange(self._start_rows)[:, None], self._start_rows)
        steps = wanted * self._period + self._start_step % self._period
        there = (wanted >= 0) & (steps >= seen - rows)
        to, envs = np.nonzero(there)
        for i in self._once:
            if len(saved[i]) == len(saved[0]):
                source = steps[there] % rows
            else:
                source = wanted[there] % -(-rows // self._period)
            self._rings[i][to, envs] = np.asarray(saved[i])[source, envs]

    def _starts_in(self, seen: np.ndarray) -> np.ndarray:
        """Returns the number of steps at which items may start among the first ``seen``."""
        return -(-(seen - self._start_step % self._period) // self._period)


def start_steps(leaves: Sequence[Any]) -> dict[int, int]:
    """Returns the numbers of the start leaves, each with its `StartSpec.step`."""
    return {i: x.step for i, x in enumerate(leaves) if isinstance(x, StartSpec)}


def _latest(steps: np.ndarray, row: np.ndarray, rows: int) -> np.ndarray:
    """Returns the last step below ``steps`` that is stored in ``row`` of a ring of ``rows``."""
    last = steps - 1
    return last - (last - row) % rows


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
