"""Where a learner's arrays are: on one device, or divided over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstack import devices
from rlstack.types import Batch, Params, PyTree

Tree = TypeVar("Tree", bound=PyTree)


class Placement:
    """Moves params, learner state and batches to the learner's devices.

    Each of several devices has its share of every batch and a copy of all the rest. XLA adds the
    gradients of the shares up.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        """Finds the devices.

        Args:
          indices: in ``jax.local_devices()``; empty for JAX's default device.

        Raises:
          ValueError: there is no device with one of the indices.
        """
        self._devices = devices.local(indices, "LearnerConfig: devices")
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
        where = self._everywhere if self.several else self._devices[0]
        return jax.device_put(tree, where)

    def owned(self, tree: Tree) -> Tree:
        """Returns copies on each device, which nothing else refers to, so that they can be donated.

        A jitted function may return its arguments, and a target network begins as the params.
        """
        return jax.tree.map(jnp.copy, self.all_of(tree))

    def one_of(self, params: Params) -> Params:
        """Returns the copy of the first device."""
        return jax.tree.map(lambda x: x.addressable_data(0), params) if self.several else params

    def batch(self, batch: Batch) -> Batch:
        """Divides a batch over the devices; on one device, the jitted update moves it.

        Raises:
          ValueError: its size is no multiple of the number of devices.
        """
        if not self.several:
            return batch
        batch_size, count = batch.weights.shape[0], len(self._devices)
        if batch_size % count:
            raise ValueError(
                f"Learner: the batch of {batch_size} items must split evenly over {count} "
                "devices. Change --replay.batch-size or --learner.devices."
            )
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
