"""Distributions over real vectors."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, PRNGKey

_LOG_2 = math.log(2.0)
_LOG_2_PI = math.log(2.0 * math.pi)
# The largest |tanh| that is inverted. Closer to 1, float32 has too few digits for the inverse.
_TANH_LIMIT = 1.0 - 1e-6
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(32)
_NODE_WEIGHTS = _NODE_WEIGHTS / _NODE_WEIGHTS.sum()


class Normal(NamedTuple):
    """A diagonal Gaussian over the last axis, D. It is unbounded, so pools clip the action."""

    mean: Array  # [..., D] float32
    log_std: Array  # [..., D] float32

    def sample(self, rng_key: PRNGKey) -> Array:
        """Draws one reparameterised action per row, [..., D]."""
        noise = jax.random.normal(rng_key, jnp.shape(self.mean), jnp.float32)
        return self.mean + jnp.exp(self.log_std) * noise

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Draws one action per row and returns it with its log density."""
        action = self.sample(rng_key)
        return action, self.log_prob(action)

    def log_prob(self, action: Array) -> Array:
        """Returns the log density summed over the last axis, [...]."""
        z = (action - self.mean) * jnp.exp(-self.log_std)
        return jnp.sum(-0.5 * (jnp.square(z) + _LOG_2_PI) - self.log_std, axis=-1)

    def entropy(self) -> Array:
        """Returns the differential entropy, [...]."""
        return jnp.sum(self.log_std + 0.5 * (_LOG_2_PI + 1.0), axis=-1)

    def kl(self, other: Normal) -> Array:
        """Returns KL(self || other), [...]."""
        log_ratio = self.log_std - other.log_std
        shift = (self.mean - other.mean) * jnp.exp(-other.log_std)
        return jnp.sum(
            0.5 * (jnp.exp(2.0 * log_ratio) + jnp.square(shift) - 1.0) - log_ratio, axis=-1
        )

    def decoupled_kl(self, other: Normal) -> tuple[Array, Array]:
        """Returns the parts of KL(self || other) of every number, each [..., D].

        The first is the divergence if only the mean were other, the second if only the standard
        deviation were (Abdolmaleki et al. 2018, arXiv:1812.02256, section 4.2.1).
        """
        of_mean = 0.5 * jnp.square((other.mean - self.mean) * jnp.exp(-self.log_std))
        log_ratio = other.log_std - self.log_std
        return of_mean, log_ratio + 0.5 * jnp.exp(-2.0 * log_ratio) - 0.5

    def mode(self) -> Array:
        """Returns the mean, [..., D]."""
        return jnp.asarray(self.mean)


class TanhNormal(NamedTuple):
    """A diagonal Gaussian squashed by tanh and scaled to [minimum, maximum] (SAC's policy).

    Haarnoja et al. 2018, "Soft Actor-Critic", appendix C. The term log(1 - tanh(u)^2) is computed
    as 2 (log 2 - u - softplus(-2u)), which is accurate at large |u|.
    """

    mean: Array  # [..., D] float32, before tanh
    log_std: Array  # [..., D] float32, before tanh
    minimum: Array  # [..., D] float32
    maximum: Array  # [..., D] float32

    def base(self) -> Normal:
        """Returns the Gaussian before tanh."""
        return Normal(self.mean, self.log_std)

    def sample(self, rng_key: PRNGKey) -> Array:
        """Draws one reparameterised action per row, [..., D], within the closed bounds."""
        return self._bound(self.base().sample(rng_key))

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Draws one action per row and returns it with its log density, without inverting tanh."""
        raw = self.base().sample(rng_key)
        return self._bound(raw), self.base().log_prob(raw) - jnp.sum(self._log_slope(raw), axis=-1)

    def log_prob(self, action: Array) -> Array:
        """Returns the log density, [...].

        It is finite at and beyond the bounds: such an action is moved to 1e-6 half-ranges inside.
        """
        half = 0.5 * (self.maximum - self.minimum)
        unit = (action - self.minimum) / half - 1.0
        raw = jnp.arctanh(jnp.clip(unit, -_TANH_LIMIT, _TANH_LIMIT))
        return self.base().log_prob(raw) - jnp.sum(self._log_slope(raw), axis=-1)

    def entropy(self) -> Array:
        """Returns the differential entropy, [...].

        There is no closed form: it is the entropy of the base plus the expected log slope of the
        squashing, E[log da/du]. Other implementations estimate the expectation from one sample.
        Here it is a 32-point Gauss-Hermite quadrature, which needs no key and has no noise.
        """
        raw = self.mean[..., None] + jnp.exp(self.log_std)[..., None] * _NODES.astype(np.float32)
        log_slope = self._log_slope(raw, (0.5 * (self.maximum - self.minimum))[..., None])
        expected = jnp.sum(log_slope * _NODE_WEIGHTS.astype(np.float32), axis=-1)
        return self.base().entropy() + jnp.sum(expected, axis=-1)

    def kl(self, other: TanhNormal) -> Array:
        """Returns KL(self || other), [...], as that of the bases; the bounds must be equal."""
        return self.base().kl(other.base())

    def mode(self) -> Array:
        """Returns the squashed mean, which is the median and the usual greedy action, [..., D]."""
        return self._bound(self.mean)

    def _bound(self, raw: Array) -> Array:
        return tanh_to_bounds(raw, self.minimum, self.maximum)

    def _log_slope(self, raw: Array, half: Array | None = None) -> Array:
        """Log derivative of the action with respect to the value before tanh."""
        half = 0.5 * (self.maximum - self.minimum) if half is None else half
        return jnp.log(half) + 2.0 * (_LOG_2 - raw - jax.nn.softplus(-2.0 * raw))


class Deterministic(NamedTuple):
    """A single action (DDPG's policy). It has no density, so only ``sample`` and ``mode`` work."""

    value: Array  # [..., *action]

    def sample(self, rng_key: PRNGKey) -> Array:
        """Returns the action; the key is not used."""
        del rng_key
        return self.mode()

    def sample_and_log_prob(self, rng_key: PRNGKey) -> tuple[Array, Array]:
        """Raises TypeError: there is no density."""
        raise self._no("log_prob")

    def log_prob(self, action: Array) -> Array:
        """Raises TypeError: there is no density."""
        raise self._no("log_prob")

    def entropy(self) -> Array:
        """Raises TypeError: there is no density."""
        raise self._no("entropy")

    def kl(self, other: Deterministic) -> Array:
        """Raises TypeError: there is no density."""
        raise self._no("kl")

    def mode(self) -> Array:
        """Returns the action."""
        return jnp.asarray(self.value)

    def _no(self, name: str) -> TypeError:
        return TypeError(
            f"Deterministic.{name}: the distribution must have a density; a single action has "
            "none. Use Normal or TanhNormal."
        )


def tanh_to_bounds(raw: Array, minimum: Array, maximum: Array) -> Array:
    """Squashes ``raw`` by tanh and scales it to [minimum, maximum]; clips rounding errors."""
    unit = 0.5 * (jnp.tanh(raw) + 1.0)
    return jnp.clip(minimum + (maximum - minimum) * unit, minimum, maximum)
