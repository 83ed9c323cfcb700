"""Networks that each of several devices runs on its shard of the rows.

The devices compute the same: each has the whole batch, the same params, and the same loss. Only the
networks are divided, as in `rlstack.networks.in_parts`, because the loss of an agent is not a sum
over rows of the batch. Each device runs a network on its own rows. Then all get the outputs of all
rows, and the gradient of the params is the sum of those of each device's rows. So a pass through a
network takes one collective forwards and one backwards, however many arrays its params are.

The functions must be traced within `rlstack.devices.by_device`, over the axis
`rlstack.devices.placement.AXIS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from rlstack.devices.placement import AXIS
from rlstack.networks import Network, PolicyAndCritic
from rlstack.networks.base import Apply
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep


def can_be_sharded(network: Any) -> bool:
    """Returns whether `by_shard` takes this network.

    It takes a `Network` or a `PolicyAndCritic` of two, without state: batch norm and dropout
    concern the whole batch.
    """
    parts = network if isinstance(network, PolicyAndCritic) else (network,)
    return all(isinstance(part, Network) and part.new_state is None for part in parts)


def by_shard(network: Any, shards: int, least_work: int = 0) -> Any:
    """Returns the network, run on one of ``shards`` equal shards of the rows on each device.

    A pass of less than ``least_work``, in params times rows, each device makes on all rows, without
    collectives. A network that draws random numbers gets the same key on each device, so it must
    draw the same for all rows, as noisy layers do.
    """
    if isinstance(network, PolicyAndCritic):
        return PolicyAndCritic(*(by_shard(part, shards, least_work) for part in network))
    # How rows are packed refers to the whole batch, and is computed for each shard instead.
    return network._replace(
        apply=_by_shard(network.apply, shards, least_work, time=0),
        unroll=_by_shard(network.unroll, shards, least_work, time=1),
        lay_out=None,
    )


def summed_over_devices(tree: PyTree) -> PyTree:
    """Returns the sum of the devices' trees of floats, by one collective."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, AXIS))


def own_rows(x: Array, shards: int, axis: int = 0, fill: str = "edge") -> jax.Array:
    """Returns this device's shard of the rows.

    Args:
      x: the rows of all devices.
      shards: the number of devices.
      axis: the axis of the rows.
      fill: padding of the shards for which too few rows remain: copies of the last row ("edge") or
          zeros ("constant").
    """
    rows = x.shape[axis]
    shard = -(-rows // shards)
    if shard * shards > rows:
        width = [(0, 0)] * x.ndim
        width[axis] = (0, shard * shards - rows)
        x = jnp.pad(x, width, mode=fill)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * shard, shard, axis)


def _by_shard(run: Apply, shards: int, least_work: int, time: int) -> Apply:
    """Divides the rows: axis ``time`` of timesteps and outputs, and axis 0 of states."""

    def run_shard(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        rows = timestep.step_type.shape[time]
        if timestep.step_type.size * sum(x.size for x in jax.tree.leaves(params)) < least_work:
            return run(rng_key, params, timestep, state)
        timestep = jax.tree.map(_divide(rows, shards, time), timestep)
        state = jax.tree.map(_divide(rows, shards, 0), state)
        result = run(rng_key, _with_summed_gradient(params), timestep, state)
        return _joined(result, (time, 0), rows, shards)

    return run_shard


def _with_summed_gradient(params: Params) -> Params:
    """Returns the params; their gradient is the sum of those of all devices."""

    @jax.custom_vjp
    def shared(floats: list[Array]) -> list[Array]:
        return floats

    shared.defvjp(lambda floats: (floats, None), lambda _, grads: (summed_over_devices(grads),))
    return _of_floats(shared, params)


def _divide(rows: int, shards: int, axis: int) -> Callable[[Array], Array]:
    """Returns a function that takes this device's rows of an array.

    Its gradient has all rows, by one collective for each array that has a gradient. It is the same
    on all devices, so its own gradient, as of a gradient penalty, is that of each device's rows.
    """

    def own(x: Array) -> Array:
        return own_rows(x, shards, axis)

    def gather(grad: Array) -> Array:
        whole = jax.lax.all_gather(grad, AXIS, axis=axis, tiled=True)
        return jax.lax.slice_in_dim(whole, 0, rows, axis=axis)

    differentiable, gathered = jax.custom_vjp(own), jax.custom_vjp(gather)
    differentiable.defvjp(lambda x: (own(x), None), lambda _, grad: (gathered(grad),))
    gathered.defvjp(
        lambda grad: (gather(grad), None),
        lambda _, x: (own_rows(x, shards, axis, fill="constant"),),
    )
    return lambda x: differentiable(x) if _is_float(x) else own(x)


def _joined(result: tuple[PyTree, PyTree], axes: tuple[int, int], rows: int, shards: int) -> Any:
    """Returns the rows of all devices, by one collective for each dtype.

    Args:
      result: the outputs and states of this device's rows.
      axes: the axis of the rows in the outputs and in the states.
      rows: number of rows on all devices together.
      shards: the number of devices.
    """
    trees = zip(result, axes, strict=True)
    first = [jax.tree.map(lambda x, a=axis: jnp.moveaxis(x, a, 0), tree) for tree, axis in trees]

    def gather(leaves: list[Array]) -> list[Array]:
        return _gathered(leaves, rows)

    def own(_: None, grads: list[Array]) -> tuple[list[Array]]:
        return ([own_rows(x, shards, fill="constant") for x in grads],)

    join = jax.custom_vjp(gather)
    join.defvjp(lambda floats: (gather(floats), None), own)
    whole = _of_floats(join, first, gather)
    trees = zip(whole, axes, strict=True)
    return tuple(
        jax.tree.map(lambda x, a=axis: jnp.moveaxis(x, 0, a), tree) for tree, axis in trees
    )


def _gathered(leaves: list[Array], rows: int) -> list[Array]:
    """Returns the rows of all devices of arrays ``[shard, ...]``, by one collective a dtype."""
    found = list(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):  # in the same order on all devices
        chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = [leaves[i].reshape((leaves[i].shape[0], -1)) for i in chosen]
        whole = jax.lax.all_gather(jnp.concatenate(flat, axis=1), AXIS, tiled=True)[:rows]
        ends = np.cumsum([x.shape[1] for x in flat])[:-1]
        for i, part in zip(chosen, jnp.split(whole, ends, axis=1), strict=True):
            found[i] = part.reshape((rows, *leaves[i].shape[1:]))
    return found


def _of_floats(
    change: Callable[[list[Array]], list[Array]],
    tree: PyTree,
    others: Callable[[list[Array]], list[Array]] = lambda leaves: leaves,
) -> Any:
    """Returns the tree with its float leaves changed together, and the rest by ``others``."""
    leaves, structure = jax.tree.flatten(tree)
    floats = [x for x in leaves if _is_float(x)]
    changed = iter(change(floats) if floats else ())
    rest = iter(others([x for x in leaves if not _is_float(x)]))
    return structure.unflatten(next(changed) if _is_float(x) else next(rest) for x in leaves)


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
