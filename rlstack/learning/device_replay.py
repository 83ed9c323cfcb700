"""Replay in the memory of a device, for environments on the host.

The table is that of a compiled loop (`rlstack.fused.ring`). A step of all environments reaches the
device in two arrays. The host counts what the table counts, so it knows what may be drawn without
waiting for the device. `rlstack.learning.device_learner` learns from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rlstack.configs.replay import ReplayConfig
from rlstack.devices.packing import Layout
from rlstack.fused.learning import Updater
from rlstack.fused.ring import Ring, RingState
from rlstack.replay.base import (
    Counts,
    ReplayClosedError,
    ReplayTimeoutError,
    Sample,
    as_logs,
    checked_priorities,
    explain_rule,
)
from rlstack.replay.frame_stack import FrameStacks
from rlstack.replay.memory import available_memory, leaf_bytes, ring_shape
from rlstack.replay.storage import checked_leaves
from rlstack.types import (
    Array,
    Batch,
    Logs,
    PRNGKey,
    PyTree,
    StartSpec,
    StepType,
    Transition,
)

_WHERE = "DeviceReplay"
_CHUNK = 64  # most steps of all environments that wait on the host while nothing is learned
_CHUNK_BYTES = 1 << 25  # and most of their bytes
_BLOCK_BYTES = 1 << 26  # of an array that a checkpoint copies at a time
# Parts of a content, of which a checkpoint has the filled rows.
_COPIED = "steps", "first_states", "begins"


class _StartLeaves(NamedTuple):
    """Says of an acting state what `Agent.read_once` says, by the spec of a step."""

    spec: PyTree

    def read_once(self, state: PyTree) -> PyTree:
        return jax.tree.map(lambda spec, _: isinstance(spec, StartSpec), self.spec, state)


class _Rows(NamedTuple):
    """What a `Ring` asks of actors."""

    num_envs: int
    agent: _StartLeaves


def make_table(
    cfg: ReplayConfig,
    num_envs: int,
    spec: Transition,
    stacks: FrameStacks | None = None,
    updater: Updater | None = None,
) -> Ring:
    """Returns the pure functions of a table; arguments as in `DeviceReplay`."""
    rows: Any = _Rows(num_envs, _StartLeaves(spec.agent_state))
    joined = None if stacks is None else stacks.joined
    first_step = 0 if stacks is None else cfg.context
    unused: Any = updater
    return Ring(cfg, rows, unused, 1, first_step=first_step, joined=joined)


def device_bytes(
    cfg: ReplayConfig, num_envs: int, spec: Transition, stacks: FrameStacks | None = None
) -> int:
    """Returns the bytes of a table on the device; arguments as in `DeviceReplay`."""
    table = make_table(cfg, num_envs, spec, stacks)
    key = jax.eval_shape(jax.random.PRNGKey, 0)
    state = jax.eval_shape(lambda key: table.empty(_rows_of(spec, num_envs), key), key)
    return sum(leaf_bytes(x) for x in jax.tree.leaves(state))


def check_room(
    num_bytes: int,
    device: jax.Device | None,
    way_out: str = "Lower --replay.max-size, or use --replay.place host.",
) -> None:
    """Raises a ValueError if a replay of this size does not fit into what is free of a device.

    Args:
      num_bytes: its bytes.
      device: the device; None for JAX's default device.
      way_out: what to change, for the message.
    """
    device = device or jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        free: int | None = stats["bytes_limit"] - stats["bytes_in_use"]
    else:
        free = available_memory() if device.platform == "cpu" else None
    if free is not None and num_bytes > free:
        raise ValueError(
            f"replay: its {num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB) must fit into what is "
            f"free of the device {device}; got {free:,} bytes. {way_out}"
        )


class _Counters:
    """Counts on the host what the table counts on the device, in the same whole numbers."""

    def __init__(self, cfg: ReplayConfig, num_envs: int, table: Ring) -> None:
        self._cfg, self._table = cfg, table
        self._items = ring_shape(cfg, num_envs).items
        self.valid = np.zeros((self._items, num_envs), bool)  # where a cell has an item
        self._types = np.zeros((cfg.unroll_length + 1, num_envs), np.int32)  # of the last steps
        self.steps = self.unbroken = 0
        self.inserts = self.samples = self.held = 0
        self.credit = table.first_credit

    @property
    def newest(self) -> int:
        """The number of the newest item of each environment."""
        return (self.steps - 1 - self._cfg.unroll_length) // self._cfg.step_period

    def add(self, step_type: np.ndarray) -> None:
        """Counts a step of all environments, ``[B]``, and the items that it completes."""
        cfg, last = self._cfg, len(self._types)
        self._types[self.steps % last] = step_type
        start = self.steps - cfg.unroll_length
        self.steps += 1
        if start < 0 or start % cfg.step_period:
            return
        before = self.valid[start // cfg.step_period % self._items]
        self.held -= int(before.sum())
        before[:] = start >= self.unbroken
        if cfg.starts == "not_last":
            before &= self._types[(start + cfg.context) % last] != StepType.LAST
        inserted = int(before.sum())
        self.held += inserted
        self.inserts += inserted
        self.credit += self._table.rate * inserted

    def ready(self) -> int:
        """Returns how many batches the rules allow now."""
        if self.inserts < self._cfg.min_size or not self.held:
            return 0
        return max(0, self.credit) // (self._table.unit * self._cfg.batch_size)

    def draw(self, batches: int) -> None:
        """Counts batches that are drawn."""
        self.samples += batches * self._cfg.batch_size
        self.credit -= batches * self._table.unit * self._cfg.batch_size

    def keys(self, cells: np.ndarray) -> np.ndarray:
        """Returns the keys of the items in these cells, ``[B]`` int64."""
        num_envs = self.valid.shape[1]
        index, env_ids = np.divmod(cells.astype(np.int64), num_envs)
        return (self.newest - (self.newest - index) % self._items) * num_envs + env_ids

    def found(self, keys: np.ndarray) -> np.ndarray:
        """Returns which items are held, the last one of equal keys, as indices of the keys."""
        num_envs = self.valid.shape[1]
        index, env_ids = np.divmod(np.asarray(keys).astype(np.int64), num_envs)
        held = (index > self.newest - self._items) & (index <= self.newest)
        held &= self.valid[index % self._items, env_ids]
        _, from_end = np.unique(keys[::-1], return_index=True)
        last = np.sort(len(keys) - 1 - from_end)
        return last[held[last]]

    def save(self) -> PyTree:
        numbers = self.steps, self.unbroken, self.inserts, self.samples, self.held, self.credit
        return {"numbers": np.array(numbers, np.int64), "types": self._types.copy()}

    def load(self, tree: PyTree, valid: np.ndarray) -> None:
        self.steps, self.unbroken, self.inserts, self.samples, self.held, self.credit = (
            int(number) for number in tree["numbers"]
        )
        self._types[:], self.valid[:] = tree["types"], valid


class DeviceReplay:
    """A ``ReplayBuffer`` in a device's memory; `rlstack.replay.ReplayBuffer` documents the methods.

    All environments must step together. It never waits, and only one thread may use it. Its draws
    are those of a compiled loop. `DeviceLearner` learns from it without moving batches to the host;
    ``sample`` moves them.

    Attributes:
      state: the content, on the device. A `DeviceLearner` replaces it, and donates the old one.
      counters: the host's counters.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        *,
        rng_key: PRNGKey,
        spec: Transition,
        stacks: FrameStacks | None = None,
        device: jax.Device | None = None,
    ) -> None:
        """Makes an empty buffer.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments, B.
          rng_key: the key of the draws.
          spec: shapes and dtypes of one environment's step as it is stored.
          stacks: what a `rlstack.replay.frame_stack.StackedReplay` around this buffer splits
            stacks with; ``cfg`` and ``spec`` are then those of the stacks. The learner gets whole
            stacks, and ``sample`` returns frames for the wrapper to join.
          device: where the steps are; None for JAX's default device.

        Raises:
          ValueError: the rules need another replay, the item processor calls numpy's functions, or
            the device has too little memory.
        """
        if num_envs < 1:
            raise ValueError(f"{_WHERE}: num_envs must be at least 1; got {num_envs}.")
        if cfg.sampler == "fifo" or cfg.times_limit or cfg.sampler_factory:
            raise ValueError(
                f"{_WHERE}: the sampler must be uniform or prioritized, without max_times_sampled "
                f"and sampler_factory; got {cfg}. Use another replay."
            )
        self._cfg, self._num_envs, self._spec, self._stacks = cfg, num_envs, spec, stacks
        self._table, self._device = self.table(None), device
        check_room(device_bytes(cfg, num_envs, spec, stacks), device)
        leaves, self._structure = jax.tree.flatten(_rows_of(spec, num_envs))
        self._shapes, self._dtypes = [x.shape for x in leaves], [np.dtype(x.dtype) for x in leaves]
        self._zeros = [np.zeros(x.shape, x.dtype) for x in leaves]
        self._layout = Layout.of(leaves, [0] * len(leaves))
        most = max(1, min(_CHUNK, _CHUNK_BYTES // max(1, self._layout.nbytes)))
        # The steps that wait, of which there are `_waiting`.
        self._packed = self._layout.empty(most)
        self._views = [self._layout.views(*rows) for rows in zip(*self._packed, strict=True)]
        self._waiting = 0
        self.counters = _Counters(cfg, num_envs, self._table)
        self._key, self._closed = np.asarray(rng_key), False  # in numpy, so that none donates it
        self.state = self._empty()
        self._write = jax.jit(self.with_steps, donate_argnums=0)
        self._draw = jax.jit(self._drawn, donate_argnums=0)
        self._prioritize = jax.jit(self._table.update_priorities, donate_argnums=0)
        self._put_back = jax.jit(self._table.write_back, donate_argnums=0)
        if cfg.item_processor:
            self._check_processor()

    def table(self, updater: Updater | None) -> Ring:
        """Returns the pure functions of the table, which learn with this updater."""
        return make_table(self._cfg, self._num_envs, self._spec, self._stacks, updater)

    def _empty(self) -> RingState:
        step = _rows_of(self._spec, self._num_envs)
        # Without it the arrays would move to JAX's default device with the next call.
        where = None if self._device is None else SingleDeviceSharding(self._device)
        start = jax.jit(lambda key: self._table.empty(step, jnp.copy(key)), out_shardings=where)
        return start(self._key)

    def _check_processor(self) -> None:
        try:
            self._table.batch_spec(self.state)
        except jax.errors.JAXTypeError as error:
            raise ValueError(
                "ReplayConfig: item_processor must compute with the module episode.xp, and not "
                "with numpy, where the replay is on a device. Use --replay.place host. JAX says: "
                f"{str(error).splitlines()[0]}"
            ) from error

    # Adding.

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of every environment."""
        self._check_open("add")
        self._check_all("add", env_ids)
        leaves = checked_leaves(transition, self._structure, self._shapes, self._dtypes)
        self._append(leaves)

    def _append(self, leaves: list[np.ndarray]) -> None:
        if self._waiting == len(self._views):
            self._write_waiting()
        for view, leaf in zip(self._views[self._waiting], leaves, strict=True):
            view[...] = leaf
        self._waiting += 1
        self.counters.add(np.asarray(leaves[0]))

    def _check_all(self, where: str, env_ids: np.ndarray | None) -> None:
        if env_ids is None or np.array_equal(env_ids, np.arange(self._num_envs)):
            return
        raise ValueError(
            f"{_WHERE}.{where}: env_ids must be all environments in order, or None, because all "
            f"step together; got {np.asarray(env_ids).tolist()!r:.100}. Use another replay."
        )

    def count_again(self) -> None:
        """Counts the batches that were drawn, after a call that drew fewer than the rules allow."""
        self._write_waiting()
        counters, size = self.counters, self._table.unit * self._cfg.batch_size
        counters.draw((counters.credit - int(self.state.credit)) // size)

    def last_step(self) -> tuple[np.ndarray, np.ndarray]:
        """Writes all steps but the last one; returns that one for `with_steps`, or no step."""
        self._check_open("sample")
        count = self._waiting
        last = self._rows(max(0, count - 1), count)
        self._waiting = max(0, count - 1)
        self._write_waiting()
        return last

    def _rows(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns copies of steps that wait; the device may read them later."""
        words, octets = self._packed
        return words[first:last].copy(), octets[first:last].copy()

    def _write_waiting(self) -> None:
        """Writes the steps that wait, in chunks of few sizes, since each size is compiled."""
        first = 0
        while left := self._waiting - first:
            last = first + (1 << (left.bit_length() - 1))
            self.state = self._write(self.state, *self._rows(first, last))
            first = last
        self._waiting = 0

    def with_steps(self, state: RingState, words: Array, octets: Array) -> RingState:
        """Returns the content with n steps that were packed, ``[n, ...]``; pure."""

        def add(i: Any, state: RingState) -> RingState:
            packed = (jax.lax.dynamic_slice_in_dim(x, i, 1) for x in (words, octets))
            step = self._structure.unflatten(self._layout.unpack(*packed))
            return self._table.add(state, step)

        count = len(words)
        return add(0, state) if count == 1 else jax.lax.fori_loop(0, count, add, state)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Marks a break of all streams; the next item starts at a multiple of the period."""
        self._check_open("gap")
        self._check_all("gap", env_ids)
        self._write_waiting()
        counters, period = self.counters, self._cfg.step_period
        after = -(-counters.steps // period) * period
        counters.unbroken = after
        self.state = self.state._replace(unbroken=self._owned(np.int32(after)))
        # Items that would have ended in the skipped steps still replace the oldest ones.
        while counters.steps < after:
            self._append(self._zeros)

    def _owned(self, tree: PyTree) -> Any:
        """Returns copies on the device, which can be donated: device_put may use numpy's memory."""
        return _copied(jax.device_put(tree, self._device))

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: added steps are available immediately."""

    # Sampling.

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        return not self._closed and self._fits(batch_size) and self.counters.ready() > 0

    def _fits(self, batch_size: int | None) -> bool:
        return batch_size is None or batch_size == self._cfg.batch_size

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of the config's size, and moves it to the host."""
        self._check_open("sample")
        if not self._fits(batch_size):
            raise ValueError(
                f"{_WHERE}.sample: batch_size must be that of the config, "
                f"{self._cfg.batch_size}, for which draws are compiled; got {batch_size}."
            )
        counters = self.counters
        if not counters.ready():
            raise ReplayTimeoutError(self._explain())
        self._write_waiting()
        self.state, cells, batch = self._draw(self.state)
        counters.draw(1)
        cells, batch = jax.tree.map(np.array, (cells, batch))
        return Sample(batch, counters.keys(cells).astype(np.uint64))

    def _drawn(self, state: RingState) -> tuple[RingState, Array, Batch]:
        state, cells, weights = self._table.draw(state)
        read = self._table.items if self._stacks is None else self._table.gather
        return state, cells, Batch(read(state, cells), weights)

    def _explain(self) -> str:
        cfg, counters = self._cfg, self.counters
        rule = "samples_per_insert" if counters.held else "items"
        rule = "min_size" if counters.inserts < cfg.min_size else rule
        counts = Counts(counters.inserts, counters.samples, counters.held, -1)
        return f"{_WHERE}.sample: {explain_rule(cfg, rule, cfg.batch_size, counts)}"

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; ignores items no longer held."""
        self._check_open("update_priorities")
        keys, priorities = checked_priorities(_WHERE, keys, priorities)
        found = self.counters.found(keys)
        if self._cfg.sampler != "prioritized" or not found.size:
            return
        self._write_waiting()
        cells = self._cells(keys[found])
        self.state = self._prioritize(self.state, cells, priorities[found].astype(np.float32))

    def _cells(self, keys: np.ndarray) -> np.ndarray:
        return (keys.astype(np.int64) % self.counters.valid.size).astype(np.int32)

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items; ignores items no longer held."""
        self._check_open("write_back")
        self._check_updates(np.asarray(keys), updates)
        found = self.counters.found(np.asarray(keys))
        if found.size:
            self._write_waiting()
            new = jax.tree.map(lambda x: np.asarray(x)[:, found], updates)
            self.state = self._put_back(self.state, self._cells(np.asarray(keys)[found]), new, True)

    def _check_updates(self, keys: np.ndarray, updates: PyTree) -> None:
        output = self._spec.agent_output
        length = self._cfg.unroll_length + 1 - self._cfg.context
        given = jax.tree.structure(output).flatten_up_to(updates)
        for i, (spec, leaf) in enumerate(zip(jax.tree.leaves(output), given, strict=True)):
            wanted = (length, len(keys), *spec.shape)
            if leaf is not None and (np.shape(leaf), leaf.dtype) != (wanted, spec.dtype):
                raise ValueError(
                    f"{_WHERE}.write_back: leaf {i} of the agent's output must be "
                    f"{spec.dtype}{wanted}, as it is stored; got {leaf.dtype}{np.shape(leaf)}."
                )

    def set_params_version(self, version: int) -> None:
        """Does nothing: no rule of these samplers depends on the version."""

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples while ``can_sample``, or until ``stop`` returns True."""
        while self.can_sample() and not (stop is not None and stop()):
            yield self.sample()

    # Statistics and checkpoints.

    def stats(self) -> Logs:
        """Returns the number of items held, and of items inserted and sampled, ever."""
        found = self.counters
        return as_logs(size=found.held, inserts=found.inserts, samples=found.samples)

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays (copies), of the steps only the filled rows."""
        self._check_open("save")
        self._write_waiting()
        parts = self.state._asdict()
        copied = {name: jax.tree.leaves(parts.pop(name)) for name in _COPIED}
        tree: dict[str, PyTree] = {
            name: [_to_host(x, min(len(x), self._filled(name))) for x in leaves]
            for name, leaves in copied.items()
        }
        rest = [np.array(x) for x in jax.tree.leaves(parts)]
        return tree | {"rest": rest, "counters": self.counters.save()}

    def _filled(self, name: str) -> int:
        steps = self.counters.steps
        return steps if name != "first_states" else -(-steps // self._cfg.step_period) + 1

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned.

        Raises:
          ValueError: the sizes differ from this buffer's.
        """
        self._check_open("load")
        self._free()
        self.state = self._empty()
        parts = self.state._asdict()
        copied = {name: parts.pop(name) for name in _COPIED}
        rest = jax.tree.leaves(parts)
        _check_sizes([x.shape for x in rest], [np.shape(x) for x in tree["rest"]])
        for name, part in copied.items():
            held = jax.tree.leaves(part)
            _check_sizes([x.shape[1:] for x in held], [np.shape(x)[1:] for x in tree[name]])
            new = [_with_rows(x, rows) for x, rows in zip(held, tree[name], strict=True)]
            copied[name] = jax.tree.unflatten(jax.tree.structure(part), new)
        loaded = self._owned([np.asarray(x) for x in tree["rest"]])
        parts = jax.tree.unflatten(jax.tree.structure(parts), loaded)
        self.state = RingState(**copied, **parts)
        self.counters.load(tree["counters"], np.asarray(parts["valid"]).copy())

    def close(self) -> None:
        """Frees the storage; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._free()

    def _free(self) -> None:
        self._waiting = 0
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"{_WHERE}.{where}: the buffer is closed.")


def _rows_of(spec: Transition, num_envs: int) -> Transition:
    """Returns shapes and dtypes of a step of all environments, from those of one environment."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_envs, *x.shape), x.dtype), spec)


@jax.jit
def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


@functools.partial(jax.jit, static_argnums=2)
def _block(array: jax.Array, first: int, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, first, count)


@functools.partial(jax.jit, donate_argnums=0)
def _with_block(array: jax.Array, rows: Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, first, 0)


def _blocks(array: Any, rows: int) -> Iterator[tuple[int, int]]:
    """Yields the first row and the number of rows of parts of an array.

    A copy of the whole array might not fit into the device's memory.
    """
    most = max(1, _BLOCK_BYTES // max(1, leaf_bytes(array) // len(array)))
    for first in range(0, rows, most):
        yield first, min(most, rows - first)


def _to_host(array: jax.Array, rows: int) -> np.ndarray:
    """Returns a copy of the first rows."""
    copied = np.empty((rows, *array.shape[1:]), array.dtype)
    for first, count in _blocks(array, rows):
        copied[first : first + count] = _block(array, first, count)
    return copied


def _with_rows(array: jax.Array, rows: np.ndarray) -> jax.Array:
    """Returns an array with other first rows; the old one must not be used again."""
    for first, count in _blocks(array, len(rows)):
        array = _with_block(array, rows[first : first + count], first)
    return array


def _check_sizes(own: Sequence[tuple[int, ...]], saved: Sequence[tuple[int, ...]]) -> None:
    if list(own) != list(saved):
        raise ValueError(
            f"{_WHERE}.load: the arrays must have the shapes that follow from this config, {own}; "
            f"got {saved}. Load into an equal config."
        )
