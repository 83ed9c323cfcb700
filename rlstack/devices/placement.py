"""Where a learner's arrays are: on one device, or divided over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstack import devices
from rlstack.devices import group
from rlstack.types import Array, Batch, PyTree

Tree = TypeVar("Tree", bound=PyTree)


class Placement:
    """Moves params, learner state and batches to the learner's devices.

    Each of several devices has its share of every batch and a copy of all the rest. XLA adds the
    gradients of the shares up. In a group of processes, each process has the batch of its devices.

    Attributes:
      several: whether there are several devices.
      processes: number of processes.
      on_cpu: whether the devices are CPUs.
    """

    def __init__(self, indices: Sequence[int], processes: int = 1) -> None:
        """Finds the devices.

        Args:
          indices: in ``jax.local_devices()`` of each process; empty for JAX's default device.
          processes: number of processes, which have joined a `rlstack.devices.group`.

        Raises:
          ValueError: there is no device with one of the indices.
        """
        self.processes = processes
        if processes > 1:
            indices = indices or (0,)
        self._devices = devices.local(indices, "LearnerConfig: devices")
        if processes > 1:
            everyone = map(group.of_process, range(processes))
            self._devices = [found[index] for found in everyone for index in indices]
        mesh = Mesh(np.array(self._devices or jax.local_devices()[:1]), ("batch",))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._by_column = NamedSharding(mesh, PartitionSpec(None, "batch"))
        self._by_row = NamedSharding(mesh, PartitionSpec("batch"))
        self.several = len(self._devices) > 1
        self.on_cpu = mesh.devices.flat[0].platform == "cpu"

    def all_of(self, tree: Tree) -> Tree:
        """Returns a tree of arrays with a copy on each device."""
        if not self._devices:
            return tree
        if self.processes > 1:
            # Computed alike, but hosts of another kind may round differently: one has them all.
            tree = multihost_utils.broadcast_one_to_all(tree)
            return jax.tree.map(lambda x: _everywhere(self._everywhere, x), tree)
        where = self._everywhere if self.several else self._devices[0]
        return jax.device_put(tree, where)

    def owned(self, tree: Tree) -> Tree:
        """Returns copies on each device, which nothing else refers to, so that they can be donated.

        A jitted function may return its arguments, and a target network begins as the params.
        """
        return jax.tree.map(jnp.copy, self.all_of(tree))

    def one_of(self, tree: Tree) -> Tree:
        """Returns the copy of this process's first device."""
        return jax.tree.map(lambda x: x.addressable_data(0), tree) if self.several else tree

    def of_update(self) -> tuple[NamedSharding, ...] | None:
        """Returns where the results of an update must be: params, state, logs and priorities.

        None lets XLA choose. In a group of processes each process must have its priorities.
        """
        if self.processes == 1:
            return None
        return (self._everywhere, self._everywhere, self._everywhere, self._by_row)

    def own_rows(self, rows: jax.Array) -> np.ndarray:
        """Returns the rows of this process."""
        if self.processes == 1:
            return np.asarray(rows)
        parts = sorted(rows.addressable_shards, key=lambda part: part.index[0].start or 0)
        return np.concatenate([np.asarray(part.data) for part in parts])

    def batch(self, batch: Batch) -> Batch:
        """Divides a batch over the devices; on one device, the jitted update moves it.

        Raises:
          ValueError: its size is no multiple of the number of devices.
        """
        if not self.several:
            return batch
        batch_size, count = batch.weights.shape[0], len(self._devices) // self.processes
        if batch_size % count:
            raise ValueError(
                f"Learner: the batch of {batch_size} items must split evenly over {count} "
                "devices. Change --replay.batch-size or --learner.devices."
            )
        if self.processes > 1:
            place = jax.make_array_from_process_local_data
            trajectory = jax.tree.map(lambda x: place(self._by_column, x), batch.trajectory)
            return Batch(trajectory, place(self._by_row, np.asarray(batch.weights)))
        return Batch(
            jax.device_put(batch.trajectory, self._by_column),
            jax.device_put(batch.weights, self._by_row),
        )

    def staged(self, batch: Batch) -> Batch:
        """Returns a copy of a batch on the devices; then the batch may be overwritten.

        It waits for the transfer, and not for computations that run on the devices.
        """
        if self.on_cpu:  # the device would use numpy's memory
            batch = jax.tree.map(np.array, batch)
        if self.several:
            batch = self.batch(batch)
        else:
            batch = jax.device_put(batch, self._devices[0] if self._devices else None)
        return jax.block_until_ready(batch)


def _everywhere(sharding: NamedSharding, x: Array) -> jax.Array:
    """Returns an array with a copy on each device of all processes, which all have its values."""
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))
