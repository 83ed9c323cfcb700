"""From tokens to the logits of actions and to the value."""

from __future__ import annotations

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax import Array

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
      layout: whose actions.
      d_qk: width of queries and keys of actions that select entities.
      tokens: ``[B, E, D]`` by slot.
      observation: tells the slots of the actors; rows without one get logits of no meaning.
    """
    names = module_names([action.name for action in layout.actions])
    parts = []
    for action in layout.actions:
        name = f"policy_head_{names[action.name]}"
        slots = observation["actors"][action.name]
        # A product with one-hot rows, not an indexed read, whose gradient would be a scatter.
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
    """Logits ``[B, A, choices]``; near zero at first, so that the first policy is near uniform."""
    init = hk.initializers.Orthogonal(0.01)
    return hk.Linear(action.num_choices, w_init=init, name=name)(actors)


def _select(layout: EntityLayout, name: str, d_qk: int, actors: Array, tokens: Array) -> Array:
    """Logits ``[B, A, slots]``: how well each entity's key answers the actor's query."""
    init = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    query = hk.Linear(d_qk, w_init=init, name=f"{name}_query")(actors)
    key = hk.Linear(d_qk, w_init=init, name=f"{name}_key")(tokens)
    logits = jnp.einsum("bad,bed->bae", query, key) / np.sqrt(d_qk)
    # A `GLOBAL` that never acts has a slot and no token; nobody may select it.
    missing = layout.num_slots - tokens.shape[1]
    return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)))


def value(tokens: Array, there: Array) -> Array:
    """Returns the value, ``[B]``: linear in the mean of all tokens, hidden ones too; 0 at first.

    Args:
      tokens: ``[B, E, D]``.
      there: bool ``[B, E]``.
    """
    weights = there / jnp.maximum(there.sum(-1, keepdims=True), 1)
    mean = jnp.einsum("be,bed->bd", weights, tokens)
    return hk.Linear(1, w_init=jnp.zeros, name="value_head")(mean)[..., 0]
