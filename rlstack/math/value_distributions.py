"""Distributions of returns: projection onto fixed atoms, and losses of atoms and quantiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstack.math.returns import symexp, symlog
from rlstack.types import Array


def project(values: Array, probs: Array, atoms: Array) -> Array:
    """Projects distributions onto evenly spaced atoms.

    Bellemare et al. (2017), https://arxiv.org/abs/1707.06887, equation 7: a value beyond the atoms
    is moved to the outermost atom, and the probability of a value between two atoms is
    divided between them in proportion to their nearness.

    Args:
      values: ``[..., M]``, the values of the distributions.
      probs: ``[..., M]``, their probabilities.
      atoms: ``[N]``, increasing by equal steps, N >= 2.

    Returns:
      The probability of each atom, ``[..., N]``.
    """
    step = (atoms[-1] - atoms[0]) / (len(atoms) - 1)
    clipped = jnp.clip(values, atoms[0], atoms[-1])
    distance = jnp.abs(clipped[..., None] - atoms) / step  # [..., M, N]
    return jnp.sum(probs[..., None] * jnp.clip(1.0 - distance, 0.0, 1.0), axis=-2)


def categorical_kl(target_probs: Array, logits: Array) -> Array:
    """Returns KL(target || softmax(logits)) in nats, ``[...]``, of arrays ``[..., N]``.

    It has the gradient of the cross-entropy but can reach 0, which makes it suitable as a priority.
    """
    entropy = -jax.scipy.special.xlogy(target_probs, target_probs).sum(axis=-1)
    return -(target_probs * jax.nn.log_softmax(logits)).sum(axis=-1) - entropy


def categorical_mean(logits: Array, atoms: Array) -> Array:
    """Returns the means ``[...]`` of distributions with logits ``[..., N]`` over atoms ``[N]``."""
    # By default GPUs and TPUs round the factors of a product, and these are results.
    return jnp.matmul(jax.nn.softmax(logits), atoms, precision=jax.lax.Precision.HIGHEST)


class ScaledAtoms(NamedTuple):
    """Atoms that are evenly spaced in a scale of the numbers that distributions over them mean.

    Schrittwieser et al. (2020), https://arxiv.org/abs/1911.08265, appendix F. The methods take the
    number of atoms from logits ``[..., N]``.
    """

    scale: Callable[[Array], Array]
    unscale: Callable[[Array], Array]
    most: float  # the largest absolute number

    def probs(self, numbers: Array, logits: Array) -> Array:
        """Returns the probabilities ``[..., N]`` that mean numbers ``[...]``, without gradient."""
        scaled = jnp.asarray(self.scale(numbers))[..., None]
        return jax.lax.stop_gradient(project(scaled, jnp.ones_like(scaled), self._of(logits)))

    def mean(self, logits: Array) -> Array:
        """Returns the numbers ``[...]`` that logits mean."""
        return self.unscale(categorical_mean(logits, self._of(logits)))

    def _of(self, logits: Array) -> jax.Array:
        most = self.scale(jnp.float32(self.most))
        return jnp.linspace(-most, most, logits.shape[-1])


class SymexpAtoms(NamedTuple):
    """Atoms that are evenly spaced in symlog of their numbers, with means of the numbers.

    Hafner et al. (2025), https://doi.org/10.1038/s41586-025-08744-2: unlike with `ScaledAtoms`,
    a mixture of distributions means the mean of the numbers that they mean.
    """

    most: float  # the largest absolute number

    def probs(self, numbers: Array, logits: Array) -> Array:
        """Returns the probabilities ``[..., N]`` that mean numbers ``[...]``, without gradient."""
        return jax.lax.stop_gradient(two_hot(numbers, self.of(logits)))

    def mean(self, logits: Array) -> Array:
        """Returns the numbers ``[...]`` that logits mean; exactly 0 for equal logits."""
        terms = jax.nn.softmax(logits) * self.of(logits)
        # Pairs of opposite atoms cancel, where a sum from left to right would round.
        return 0.5 * (terms + terms[..., ::-1]).sum(axis=-1)

    def of(self, logits: Array) -> jax.Array:
        """Returns the atoms ``[N]``."""
        half = symlog(jnp.float32(self.most))
        atoms = symexp(jnp.linspace(-half, half, logits.shape[-1]))
        return 0.5 * (atoms - atoms[::-1])  # symmetric to the last bit


def two_hot(numbers: Array, atoms: Array) -> jax.Array:
    """Returns the probabilities ``[..., N]`` of the two nearest atoms whose mean is the number.

    Args:
      numbers: ``[...]``; one beyond the atoms counts as the outermost.
      atoms: ``[N]``, increasing, N >= 2.
    """
    x = jnp.clip(jnp.asarray(numbers, jnp.float32), atoms[0], atoms[-1])[..., None]
    steps = atoms[1:] - atoms[:-1]
    ends = [(0, 0)] * (x.ndim - 1)
    rising = jnp.pad((x - atoms[:-1]) / steps, [*ends, (1, 0)], constant_values=1.0)
    falling = jnp.pad((atoms[1:] - x) / steps, [*ends, (0, 1)], constant_values=1.0)
    return jnp.maximum(jnp.minimum(rising, falling), 0.0)


def midpoints(num_quantiles: int) -> Array:
    """Returns the fractions (i + 1/2) / N, ``[N]``, of the quantiles of QR-DQN (its lemma 2)."""
    return (jnp.arange(num_quantiles, dtype=jnp.float32) + 0.5) / num_quantiles


def quantile_huber_loss(
    quantiles: Array, fractions: Array, targets: Array, huber_delta: float
) -> Array:
    """Returns the loss that is minimal at the quantiles of the targets.

    Dabney et al. (2018b), https://arxiv.org/abs/1806.06923, equation 3, and for fixed fractions
    Dabney et al. (2018a), https://arxiv.org/abs/1710.10044, equation 10 divided by kappa: the sum
    over quantiles of the mean over targets of |fraction - 1{u < 0}| huber(u) / huber_delta, where
    u = target - quantile.

    Args:
      quantiles: ``[..., N]``.
      fractions: ``[..., N]`` in [0, 1], the fraction of each quantile.
      targets: ``[..., M]``, samples of the target distribution; their gradients are stopped.
      huber_delta: kappa, the error beyond which the loss is linear; 0 makes it linear everywhere.

    Returns:
      The loss, ``[...]``.
    """
    errors = jax.lax.stop_gradient(targets)[..., None, :] - quantiles[..., :, None]
    size = jnp.abs(errors)
    if huber_delta:
        within = jnp.minimum(size, huber_delta)
        size = within * (size - 0.5 * within) / huber_delta
    weight = jnp.abs(fractions[..., :, None] - (errors < 0))
    return (weight * size).mean(axis=-1).sum(axis=-1)
