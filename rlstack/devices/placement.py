"""Placement of a learner's arrays: on one device, or divided over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstack import devices
from rlstack.devices.packing import Layout, columns
from rlstack.types import Array, Batch, PyTree

Tree = TypeVar("Tree", bound=PyTree)
AXIS = "batch"  # the axis of the mesh, along which batches are divided


class Placement:
    """Moves params, learner state and batches to the learner's devices.

    Each of several devices has its share of every batch and a copy of all the rest. XLA adds the
    gradients of the shares up. In a group of processes, each process has the batch of its devices.

    Attributes:
      several: whether there are several devices.
      processes: number of processes.
      mesh: the devices of all processes, in the order of their shares.
      on_cpu: whether the devices are CPUs.
      everywhere: the sharding of arrays with a copy on each device.
    """

    def __init__(self, indices: Sequence[int], processes: int = 1) -> None:
        """Finds the devices.

        Args:
          indices: indices into ``jax.local_devices()`` of each process; empty for JAX's default
            device.
          processes: number of processes, which have joined a `rlstack.devices.group`.

        Raises:
          ValueError: there is no device with one of the indices.
        """
        self.processes = processes
        if processes > 1:
            indices = indices or (0,)
        self._devices = devices.local(indices, "LearnerConfig: devices")
        if processes > 1:
            from rlstack.devices import group  # few runs have one

            everyone = map(group.of_process, range(processes))
            self._devices = [found[index] for found in everyone for index in indices]
        mesh = Mesh(np.array(self._devices or jax.local_devices()[:1]), (AXIS,))
        self.mesh = mesh
        if mesh.size > 1:
            devices.compile_collectives_anew()
        own = jax.process_index() if processes > 1 else None
        self._local = [d for d in mesh.devices.flat if own in (None, d.process_index)]
        self._first = list(mesh.devices.flat).index(self._local[0])  # position of own shares
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self._by_column = NamedSharding(mesh, PartitionSpec(None, AXIS))
        self._by_row = NamedSharding(mesh, PartitionSpec(AXIS))
        self.several = len(self._devices) > 1
        self.on_cpu = mesh.devices.flat[0].platform == "cpu"

    def all_of(self, tree: Tree) -> Tree:
        """Returns a tree of arrays with a copy on each device."""
        if not self._devices:
            return tree
        if self.processes > 1:
            # Computed alike, but hosts of another kind may round differently: one has them all.
            tree = multihost_utils.broadcast_one_to_all(tree)
            return jax.tree.map(lambda x: _everywhere(self.everywhere, x), tree)
        where = self.everywhere if self.several else self._devices[0]
        return jax.device_put(tree, where)

    def owned(self, tree: Tree) -> Tree:
        """Returns copies on each device, which nothing else refers to, so that they can be donated.

        A jitted function may return its arguments, and a target network begins as the params.
        """
        tree = self.all_of(tree)
        # On one device by one compiled function, and not by one for each shape.
        return jax.tree.map(jnp.copy, tree) if self.several else jax.jit(_copies)(tree)

    def one_of(self, tree: Tree) -> Tree:
        """Returns the copy of this process's first device."""
        return jax.tree.map(lambda x: x.addressable_data(0), tree) if self.several else tree

    def of_update(self) -> tuple[NamedSharding, ...] | None:
        """Returns where the results of an update must be: params, state, logs and priorities.

        None lets XLA choose. In a group of processes each process must have its priorities.
        """
        return None if self.processes == 1 else self.of_sharded_update()

    def of_sharded_update(self) -> tuple[NamedSharding, ...]:
        """Returns the same for an update in which each device has the priorities of its rows."""
        return (self.everywhere, self.everywhere, self.everywhere, self._by_row)

    def own_rows(self, rows: jax.Array) -> np.ndarray:
        """Returns the rows of this process."""
        if self.processes == 1:
            return np.asarray(rows)
        return np.concatenate([rows.addressable_data(i) for i in range(len(self._local))])

    def by_process(self, rows: jax.Array) -> np.ndarray:
        """Returns one row of each process, from one of each device; all processes have them."""
        return np.asarray(rows)[:: len(self._local)]

    def batch(self, batch: Batch) -> Batch:
        """Divides a batch over the devices; on one device, the jitted update moves it.

        Raises:
          ValueError: the size of the batch is no multiple of the number of devices.
        """
        if not self.several:
            return batch
        self._check(batch)
        trajectory = jax.tree.map(
            lambda x: self._divided(x, self._by_column, axis=1), batch.trajectory
        )
        return Batch(trajectory, self._divided(batch.weights, self._by_row, axis=0))

    def packed(self, batch: Batch, votes: np.ndarray) -> tuple[Layout, jax.Array, jax.Array]:
        """Divides a batch like `batch`, with the arrays of each share packed as two.

        Args:
          batch: the batch of this process.
          votes: int32 ``[n]``, which each share of this process gets as well.

        Returns:
          The layout of a share of (batch, votes), and the words and bytes of all shares.

        Raises:
          ValueError: the size of the batch is no multiple of the number of devices.
        """
        self._check(batch)
        axis_of_weights: Any = 0
        rows = Batch(jax.tree.map(lambda x: 1, batch.trajectory), axis_of_weights)
        shares = [(share, votes) for share in columns(batch, rows, len(self._local))]
        layout = Layout.of(shares[0], (rows, 0))
        words, octets = zip(*map(layout.pack, shares), strict=True)
        return layout, self._rows(words), self._rows(octets)

    def _rows(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """Returns an array of which each device has a row; the parts are those of this process."""
        return self._of_parts(parts, self._by_row, axis=0)

    def _divided(self, x: Array, sharding: NamedSharding, axis: int) -> jax.Array:
        return self._of_parts(np.split(np.asarray(x), len(self._local), axis), sharding, axis)

    def _of_parts(
        self, parts: Sequence[np.ndarray], sharding: NamedSharding, axis: int
    ) -> jax.Array:
        # jax.device_put and jax.make_array_from_single_device_arrays take three times as long.
        size, shape = parts[0].shape[axis], list(parts[0].shape)
        shape[axis] *= self.mesh.size

        def part(index: Any) -> np.ndarray:
            return parts[(index[axis].start or 0) // size - self._first]

        return jax.make_array_from_callback(tuple(shape), sharding, part)

    def _check(self, batch: Batch) -> None:
        batch_size, count = batch.weights.shape[0], len(self._local)
        if batch_size % count:
            raise ValueError(
                f"Learner: the batch of {batch_size} items must split evenly over {count} "
                "devices. Change --replay.batch-size or --learner.devices."
            )

    def staged(self, batch: Batch) -> Batch:
        """Returns a copy of a batch on the only device; then the batch may be overwritten.

        It waits for the transfer, and not for computations that run on the device.
        """
        if self.on_cpu:  # the device would use numpy's memory
            batch = jax.tree.map(np.array, batch)
        batch = jax.device_put(batch, self._devices[0] if self._devices else None)
        return jax.block_until_ready(batch)


def _everywhere(sharding: NamedSharding, x: Array) -> jax.Array:
    """Returns an array with a copy on each device of all processes, which all have its values."""
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _copies(tree: Tree) -> Tree:
    return jax.tree.map(jnp.copy, tree)
