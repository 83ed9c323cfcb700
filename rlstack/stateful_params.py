"""Params of networks with state or dropout, and the two modes of such a network.

The params of such a network are `StatefulParams`: weights, and a state such as the running
statistics of batch norm. The learner publishes both together, so acting, checkpoints and inference
services have the state that belongs to the weights. With these params a network is in evaluation
mode: there is no dropout, and batch norm uses the running statistics. In a loss the params are
`TrainingParams`: dropout draws from their key, and batch norm uses the statistics of the batch.

The functions of this module take params of any structure, such as those of a policy and critics.
Params of networks without state pass through unchanged.

Weights named ``unit_w`` have the norm 1 for each output; `on_sphere` keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from rlstack.types import Array, Params, PRNGKey, PyTree

UNIT_WEIGHTS = "unit_w"  # the name of weights [..., inputs, outputs] of norm 1 for each output
_STREAM = 0x5EED  # so that the key differs from those that jax.random.split gives
Aux = TypeVar("Aux")


class StatefulParams(NamedTuple):
    """Published params of a network with state; with them, the network is in evaluation mode."""

    weights: Params
    state: PyTree  # empty for a network with dropout only


class TrainingParams(NamedTuple):
    """Params of a network with state in a loss; with them, the network is in training mode."""

    weights: Params
    state: PyTree
    rng_key: PRNGKey  # the key for dropout


def has_state(network: Any) -> bool:
    """Returns whether a `Network`, or a network of a `PolicyAndCritic`, has a training mode."""
    parts = network if isinstance(network, tuple) else ()
    return any(getattr(part, "new_state", None) is not None for part in (network, *parts))


def is_stateful(params: Params) -> bool:
    """Returns whether any part of the params belongs to a network with state."""
    return any(map(_is_node, jax.tree.leaves(params, is_leaf=_is_node)))


def weights_of(params: Params) -> PyTree:
    """Returns the params without states, which is what optimizers see."""
    return jax.tree.map(lambda x: x.weights if _is_node(x) else x, params, is_leaf=_is_node)


def with_weights(params: Params, weights: PyTree) -> Params:
    """Returns the params with other weights: the inverse of `weights_of`."""
    return jax.tree.map(
        lambda x, new: x._replace(weights=new) if _is_node(x) else new,
        params,
        weights,
        is_leaf=_is_node,
    )


def weight_gradients(
    loss: Callable[[Params], tuple[Array, Aux]], params: Params
) -> tuple[PyTree, Aux]:
    """Returns (gradients, aux): the loss is differentiated with respect to the weights only.

    Args:
      loss: a function of params that returns (loss, aux), where aux is any tree.
      params: the params at which the gradients are taken, as `training` returns them.
    """
    weights = weights_of(params)
    return jax.grad(lambda new: loss(with_weights(params, new)), has_aux=True)(weights)


def training(rng_key: PRNGKey, params: Params, num_updates: Any = 0) -> Params:
    """Returns the params with which networks are in training mode.

    Args:
      rng_key: the learner's key. It may be used for something else too, because the key of dropout
          is derived from it in another way than by ``jax.random.split``.
      params: the params; all parts with state get different keys.
      num_updates: updates so far. Give it if rng_key does not change with each update.
    """
    if not is_stateful(params):
        return params
    key = jax.random.fold_in(jax.random.fold_in(rng_key, _STREAM), num_updates)
    nodes, structure = jax.tree.flatten(params, is_leaf=_is_node)
    return structure.unflatten(
        TrainingParams(x.weights, x.state, jax.random.fold_in(key, i)) if _is_node(x) else x
        for i, x in enumerate(nodes)
    )


def evaluating(params: Params) -> Params:
    """Returns the params with which networks are in evaluation mode: the inverse of `training`."""
    return jax.tree.map(
        lambda x: StatefulParams(x.weights, x.state) if _is_node(x) else x,
        params,
        is_leaf=_is_node,
    )


def moved_towards(params: Params, target: Params, rate: Any) -> Params:
    """Returns target + rate (params - target): Polyak averaging; counters are copied.

    The running statistics move at the same rate as the weights, because they describe the features
    that these weights compute.
    """

    def move(new: Any, old: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(new), jnp.inexact):
            return new
        return rate * new + (1.0 - rate) * old

    return jax.tree.map(move, params, target)


def on_sphere(weights: PyTree) -> PyTree:
    """Returns the weights, with the norm 1 for each output of those named ``unit_w``."""

    def project(path: tuple[Any, ...], x: Any) -> Any:
        named = bool(path) and getattr(path[-1], "key", "") == UNIT_WEIGHTS
        return normed(x, -2) if named else x

    return jax.tree_util.tree_map_with_path(project, weights)


def normed(x: Array, axis: int) -> jax.Array:
    """Returns vectors along an axis divided by their Euclidean norm, or by 1e-8 if that is more."""
    square = jnp.sum(jnp.square(jnp.asarray(x, jnp.float32)), axis=axis, keepdims=True)
    return jnp.asarray(x * jax.lax.rsqrt(jnp.maximum(square, 1e-16)), x.dtype)


def _is_node(x: Any) -> bool:
    return isinstance(x, StatefulParams | TrainingParams)
