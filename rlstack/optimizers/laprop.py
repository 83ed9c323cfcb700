"""LaProp, which optax does not have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from rlstack.types import PyTree

_LEAST_NORM = 1e-3  # of params, so that those that are 0 can move


def laprop(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-20,
    agc: float = 0.0,
) -> optax.GradientTransformation:
    """Returns the optimizer of Ziyin et al. (2020), https://arxiv.org/abs/2002.04839.

    Gradients are divided by the root of the mean of their squares before the momentum is taken of
    them, so that a gradient that is large for once does not last. Both means are corrected for
    their first steps.

    Args:
      learning_rate: the step size.
      b1: decay of the momentum.
      b2: decay of the mean of squared gradients.
      eps: added to the root.
      agc: largest norm of the gradient of an array, relative to the norm of its params; 0 does not
        clip. Brock et al. (2021), https://arxiv.org/abs/2102.06171, with one norm for an array.
    """
    scaled = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
    rest = scaled, optax.ema(b1), optax.scale_by_learning_rate(learning_rate)
    clip = optax.stateless(lambda updates, params: clipped(updates, params, agc))
    return optax.chain(*([clip] if agc else []), *rest)


def clipped(updates: PyTree, params: PyTree, most: float) -> PyTree:
    """Scales each gradient down to a norm of at most ``most`` times the norm of its params."""

    def clip(update: jax.Array, param: jax.Array) -> jax.Array:
        norm, bound = jnp.linalg.norm(update.ravel()), jnp.linalg.norm(param.ravel())
        bound = most * jnp.maximum(bound, _LEAST_NORM)
        return update / jnp.maximum(norm / bound, 1.0)

    return jax.tree.map(clip, updates, params)
