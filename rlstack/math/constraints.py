"""Losses of policies whose KL divergence from an older policy is bounded, as in MPO and V-MPO.

A bound is a constraint of an optimisation problem. Its Lagrange multiplier is a learned number, the
*dual*, which grows while the bound is broken: Abdolmaleki et al. (2018a),
https://arxiv.org/abs/1806.06920, section 4, and (2018b), https://arxiv.org/abs/1812.02256.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlstack.types import Array

_LEAST = 1e-8  # a dual is at least this


def dual(raw: Array) -> Array:
    """Returns positive duals of learned real numbers, by softplus."""
    return jax.nn.softplus(raw) + _LEAST


def raw_dual(value: float) -> float:
    """Inverts `dual`, for an initial value."""
    return value + math.log(-math.expm1(-value))


def temperature_loss(log_mean: Array, temperature: Array, epsilon: float) -> Array:
    """Returns the loss of the temperature, []; its minimum makes the KL divergence epsilon.

    Args:
      log_mean: [], the mean over states of the logarithm of the old policy's mean of
        ``exp(value / temperature)``.
      temperature: [], the dual.
      epsilon: the bound on the KL divergence of the weighted policy from the old one.
    """
    return temperature * (epsilon + log_mean)


def kl_losses(kl: Array, alpha: Array, epsilon: float) -> tuple[Array, Array]:
    """Returns the penalty on a KL divergence, and the loss of its dual, both [].

    Args:
      kl: [] or [D], means over states; the bound holds for each of the D separately.
      alpha: the duals, of the same shape.
      epsilon: the bound.
    """
    penalty = jnp.sum(jax.lax.stop_gradient(alpha) * kl)
    return penalty, jnp.sum(alpha * (epsilon - jax.lax.stop_gradient(kl)))
