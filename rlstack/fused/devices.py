"""Placement of a compiled loop's arrays: environment rows are divided over local devices.

XLA divides the computation by where its arrays are, and adds what the devices must exchange: sums
of gradients, and rows that a minibatch takes from all devices. So the loop computes what one device
computes, up to the order of sums.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstack.networks import Network, PolicyAndCritic
from rlstack.networks.base import Apply
from rlstack.types import AgentState, Params, PRNGKey, PyTree, TimeStep

WHOLE = -1  # the axis of environments of an array that every device has whole


class Devices:
    """The devices of a loop. Without a mesh there is one device, and the methods change nothing."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        """Stores the mesh, which has one axis."""
        self._mesh = mesh

    def shardings(self, tree: PyTree, axes: PyTree) -> PyTree:
        """Returns the sharding of each array; None for one device.

        Args:
          tree: a pytree of arrays.
          axes: a tree with the axis of environments of each array, which is divided, or `WHOLE`.
        """
        if self._mesh is None:
            return None
        return jax.tree.map(lambda x, axis: self._sharding(axis), tree, axes)

    def placed(self, tree: PyTree, axes: PyTree) -> PyTree:
        """Returns the arrays on their devices; see `shardings`."""
        if self._mesh is None:
            return tree
        return jax.device_put(tree, self.shardings(tree, axes))

    def divided(self, tree: PyTree, axis: int) -> PyTree:
        """Divides this axis of all arrays, in a function that JAX traces.

        An axis that does not divide evenly stays as the compiler has it.
        """
        if self._mesh is None:
            return tree
        size, sharding = self._mesh.size, self._sharding(axis)

        def constrain(x: Any) -> Any:
            return x if x.shape[axis] % size else jax.lax.with_sharding_constraint(x, sharding)

        return jax.tree.map(constrain, tree)

    def constrained(self, tree: PyTree, axes: PyTree) -> PyTree:
        """Keeps the arrays where `placed` puts them, in a function that JAX traces."""
        if self._mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree, axes))

    def network(self, network: Any) -> Any:
        """Returns a network that divides the rows of its inputs.

        An agent with epochs gathers minibatches from the rows of all devices. The compiler would
        then compute each whole minibatch on every device. Networks that are no
        `rlstack.networks.Network` are returned as they are.
        """
        if self._mesh is None:
            return network
        if isinstance(network, PolicyAndCritic):
            return PolicyAndCritic(self.network(network.policy), self.network(network.critic))
        if not isinstance(network, Network):
            return network
        return network._replace(
            apply=self._by_rows(network.apply, axis=0), unroll=self._by_rows(network.unroll, axis=1)
        )

    def _by_rows(self, run: Apply, axis: int) -> Apply:
        def run_divided(
            rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
        ) -> tuple[PyTree, AgentState]:
            return run(rng_key, params, self.divided(timestep, axis), self.divided(state, 0))

        return run_divided

    def _sharding(self, axis: int) -> NamedSharding:
        assert self._mesh is not None
        if axis == WHOLE:
            return NamedSharding(self._mesh, PartitionSpec())
        return NamedSharding(self._mesh, PartitionSpec(*[None] * axis, *self._mesh.axis_names))
