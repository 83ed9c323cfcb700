"""Rules for `agents.fixed.Scripted`, of environments whose answer is known."""

from __future__ import annotations

import jax.numpy as jnp

from rlstack.types import Array, PyTree


def balance_cartpole(observation: Array) -> Array:
    """Pushes the cart of CartPole-v1 under its falling pole, and gently back to the middle.

    Args:
      observation: ``[B, 4]``: position, velocity, angle, angular velocity.

    Returns:
      The action, ``[B]``: 1 (right) where a weighted sum of the four is positive, else 0. It
      balances for all 500 steps from every start that was tried.
    """
    weights = jnp.asarray([0.02, 0.1, 1.0, 0.5], jnp.float32)
    return (observation @ weights > 0).astype(jnp.int32)


def count_beans(observation: PyTree) -> PyTree:
    """Says how many beans there are in the entity game Count.

    Args:
      observation: the padded arrays of `rlstack.entity`, ``[B, ...]``.

    Returns:
      The action, ``{"count": [B, 1]}``, always right.
    """
    return {"count": observation["count"]["Bean"][:, None]}


def jump_to_high_ground(observation: PyTree) -> PyTree:
    """Jumps to the HighGround of the entity game FloorIsLava.

    Args:
      observation: the padded arrays of `rlstack.entity`, ``[B, ...]``.

    Returns:
      The action, ``{"move": [B, 1]}``, always right.
    """
    features = observation["features"]
    offset = features["HighGround"] - features["Player"]  # [B, 1, 2]
    n_to_nw = [(0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1)]
    steps = jnp.asarray(n_to_nw, jnp.float32)
    distance = jnp.abs(offset[:, :, None] - steps).sum(axis=-1)
    return {"move": distance.argmin(axis=-1).astype(jnp.int32)}
