"""Rules for `rlstack.agents.fixed.Scripted`, for environments with a known solution."""

from __future__ import annotations

import jax.numpy as jnp

from rlstack.types import Array, PyTree

BASE_STOCK = 15.0  # the level of `order_up_to_base_stock`, in units


def balance_cartpole(observation: Array) -> Array:
    """Pushes the cart of CartPole-v1 under its falling pole, and slowly back to the middle.

    Args:
      observation: ``[B, 4]``: position, velocity, angle, angular velocity.

    Returns:
      The action, ``[B]``: 1 (right) where a weighted sum of the four numbers is positive, else 0.
      It balances for all 500 steps from every initial state that was tried.
    """
    weights = jnp.asarray([0.02, 0.1, 1.0, 0.5], jnp.float32)
    return (observation @ weights > 0).astype(jnp.int32)


def jump_to_high_ground(observation: PyTree) -> PyTree:
    """Jumps to the HighGround of the entity game FloorIsLava.

    Args:
      observation: the padded arrays of `rlstack.entity`, ``[B, ...]``.

    Returns:
      The action, ``{"move": [B, 1]}``, which is always correct.
    """
    features = observation["features"]
    offset = features["HighGround"] - features["Player"]  # [B, 1, 2]
    n_to_nw = [(0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1)]
    steps = jnp.asarray(n_to_nw, jnp.float32)
    distance = jnp.abs(offset[:, :, None] - steps).sum(axis=-1)
    return {"move": distance.argmin(axis=-1).astype(jnp.int32)}


def push_with_velocity(observation: Array) -> Array:
    """Pushes the car of MountainCarContinuous-v0 the way it moves, so that it swings up the hill.

    Args:
      observation: ``[B, 2]``: position and velocity.

    Returns:
      The action, ``[B, 1]``: 1 where the velocity is 0 or more, else -1. It reaches the goal within
      150 steps, with a return of about 90.
    """
    return jnp.where(observation[:, 1:] >= 0, 1.0, -1.0).astype(jnp.float32)


def order_up_to_base_stock(observation: Array) -> Array:
    """Orders up to the base stock in `rlstack.envs.seats.supply_chain.SupplyChain`.

    This is the base stock rule of inventory control: whatever is demanded is ordered again, so that
    stock and units ordered, less units owed, stay at one level (Clark and Scarf, 1960).

    Args:
      observation: ``[B, 4 + facilities]``.

    Returns:
      The action, ``[B]``. The level is the best of a search with this rule in all seats.
    """
    stock, owed, ordered, demand = jnp.moveaxis(observation[:, :4] * 10.0, 1, 0)
    missing = BASE_STOCK - (stock - owed + ordered)
    return jnp.clip(jnp.round(missing - demand + 4.0), 0, 8).astype(jnp.int32)
