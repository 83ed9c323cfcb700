"""Heads of the transformer: the logits of actions and the value."""

from __future__ import annotations

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.networks.layers.linear import Linear
from rlstack.networks.ragged.entity_layout import (
    SELECT_ENTITY,
    EntityAction,
    EntityLayout,
    module_names,
)
from rlstack.types import PyTree


def policy_logits(layout: EntityLayout, d_qk: int, tokens: Array, observation: PyTree) -> Array:
    """Returns the logits of all actions, ``[B, sum of capacity * choices]``, unmasked.

    Args:
      layout: the layout of the observation and the actions.
      d_qk: width of queries and keys of actions that select entities.
      tokens: ``[B, E, D]``, by slot.
      observation: an observation with the slots of the actors; the logits of missing actors are
        undefined.
    """
    names = module_names([action.name for action in layout.actions])
    parts = []
    for action in layout.actions:
        name = f"policy_head_{names[action.name]}"
        slots = observation["actors"][action.name]
        # A product with one-hot rows: the gradient of an indexed read is a scatter, which is slow.
        chosen = slots[..., None] == jnp.arange(tokens.shape[1])
        actors = chosen.astype(tokens.dtype) @ tokens  # [B, A, D]
        logits = (
            _select(layout, name, d_qk, actors, tokens)
            if action.kind == SELECT_ENTITY
            else _categorical(action, name, actors)
        )
        parts.append(logits.reshape((logits.shape[0], -1)))
    return jnp.concatenate(parts, axis=-1)


def _categorical(action: EntityAction, name: str, actors: Array) -> Array:
    """Returns logits ``[B, A, choices]``, initially near zero: the first policy is near uniform."""
    init = hk.initializers.Orthogonal(0.01)
    return Linear(action.num_choices, w_init=init, name=name)(actors)


def _select(layout: EntityLayout, name: str, d_qk: int, actors: Array, tokens: Array) -> Array:
    """Returns logits ``[B, A, slots]``: products of the actor's query and each entity's key."""
    init = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    query = Linear(d_qk, w_init=init, name=f"{name}_query")(actors)
    key = Linear(d_qk, w_init=init, name=f"{name}_key")(tokens)
    logits = jnp.einsum("bad,bed->bae", query, key) / np.sqrt(d_qk)
    # A `GLOBAL` that never acts has a slot but no token; the action mask excludes it.
    missing = layout.num_slots - tokens.shape[1]
    return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)))


def value(tokens: Array, present: Array) -> Array:
    """Returns the value ``[B]``, initially 0: linear in the mean of all tokens, also hidden ones.

    Args:
      tokens: ``[B, E, D]``.
      present: bool ``[B, E]``, which slots hold an entity.
    """
    weights = present / jnp.maximum(present.sum(-1, keepdims=True), 1)
    mean = jnp.einsum("be,bed->bd", weights, tokens)
    return Linear(1, w_init=jnp.zeros, name="value_head")(mean)[..., 0]
