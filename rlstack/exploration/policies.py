"""Policies: functions from a distribution to an action."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.checks import Checked, WrongKindError
from rlstack.configs.exploration import PARAMETERS, Kind
from rlstack.distributions import (
    ILLEGAL,
    Categorical,
    Distribution,
    Joint,
    MultiCategorical,
    TanhNormal,
)
from rlstack.exploration.schedules import (
    Constant,
    RunCounts,
    Schedule,
    with_run_counts,
)
from rlstack.types import Array, Counts, PRNGKey, PyTree

Policy = Callable[[PRNGKey, Distribution, Counts], PyTree]
Bound = float | tuple[float, ...] | None
NoiseType = TypeVar("NoiseType", bound="_Noise")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Draws from the distribution itself."""

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> PyTree:
        """Returns an action, [B, ...]."""
        del counts
        return distribution.sample(rng_key)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Takes the mode of the distribution or, with probability epsilon, a random action."""

    epsilon: float = 0.0
    "Probability of a uniformly random legal action, for discrete actions; see `EpsilonGreedy`."

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> PyTree:
        """Returns an action, [B, ...]."""
        if self.epsilon:
            return EpsilonGreedy(self.epsilon)(rng_key, distribution, counts)
        return distribution.mode()


@dataclasses.dataclass(frozen=True)
class After:
    """Acts as another policy does at fixed counts, whatever the counts of the environments are.

    Frozen agents act so: their schedules stay where their training ended.
    """

    policy: Policy
    "The other policy."
    run_counts: RunCounts
    "The counts."

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> PyTree:
        """Returns an action, [B, ...]."""
        return self.policy(rng_key, distribution, with_run_counts(counts, self.run_counts))


def explores(policy: Policy) -> bool:
    """Returns whether a policy explores; all policies except `Greedy` do.

    An agent with a noisy network uses the noise only if its policy explores. With `Greedy`, as in
    evaluation, it uses the mean weights.
    """
    return not isinstance(policy, Greedy)


def _check_parameter(policy: Checked, kind: Kind) -> None:
    """Checks the parameter of a policy of this kind, unless the parameter is a schedule."""
    name, fits, rule = PARAMETERS[kind]
    if not callable(value := getattr(policy, name)):
        policy.require(name, fits(value), rule)


@dataclasses.dataclass(frozen=True)
class EpsilonGreedy(Checked):
    """Takes the mode, or with probability epsilon a uniformly random legal action.

    With several discrete choices there is one draw per row: either the whole action is greedy or
    the whole action is random.
    """

    epsilon: float | Schedule
    "Probability of a random action, in [0, 1]; a float or a schedule."

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_parameter(self, "epsilon_greedy")

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> PyTree:
        """Returns an action, [B, ...]."""
        coin_key, action_key = jax.random.split(rng_key)
        epsilon = _value(self.epsilon, counts)
        explore = jax.random.uniform(coin_key, epsilon.shape) < epsilon
        uniform = _retemper(distribution, jnp.full(epsilon.shape, jnp.inf), "EpsilonGreedy")
        return jax.tree.map(
            lambda drawn, best: jnp.where(_rows(explore, drawn.ndim), drawn, best),
            uniform.sample(action_key),
            distribution.mode(),
        )


@dataclasses.dataclass(frozen=True)
class Softmax(Checked):
    """Draws discrete actions after dividing the logits (or Q-values) by a temperature."""

    temperature: float | Schedule = 1.0
    "Positive temperature; a float or a schedule. Small is near greedy, large is near uniform."

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_parameter(self, "softmax")

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> PyTree:
        """Returns an action, [B, ...]."""
        temperature = _value(self.temperature, counts)
        return _retemper(distribution, temperature, "Softmax").sample(rng_key)


@dataclasses.dataclass(frozen=True)
class _Noise(Checked):
    """The mode of a continuous distribution plus noise, clipped to bounds."""

    scale: float | Schedule
    "Scale of the noise, in units of the action; a float or a schedule."
    relative: bool = False
    "Whether to multiply the scale by the absolute value of the mode."
    minimum: Bound = None
    "Lower bound of the action, a number or one per dimension; None takes that of a TanhNormal."
    maximum: Bound = None
    "Upper bound of the action, a number or one per dimension; None takes that of a TanhNormal."

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_parameter(self, "gaussian_noise")

    def bounded_by(self: NoiseType, action_spec: specs.Array) -> NoiseType:
        """Returns this policy with the bounds of a float spec, if the spec has bounds.

        Raises:
          ValueError: the spec is not a single array.
        """
        if not isinstance(action_spec, specs.Array):
            raise ValueError(
                f"{type(self).__name__}.bounded_by: the spec must be that of one array; got "
                f"{type(action_spec).__name__}. Set minimum and maximum instead."
            )

        def bound(name: str) -> Bound:
            values = getattr(action_spec, name, None)
            if values is None:
                return None
            return tuple(np.broadcast_to(values, action_spec.shape).ravel().tolist())

        return dataclasses.replace(self, minimum=bound("minimum"), maximum=bound("maximum"))

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> PyTree:
        """Returns an action, [B, ..., D]."""
        if isinstance(distribution, Joint):
            return distribution.map(
                lambda d, key: self(key, d, counts), distribution.split(rng_key)
            )
        mode = distribution.mode()
        if not jnp.issubdtype(mode.dtype, jnp.floating):
            raise WrongKindError(
                f"{type(self).__name__}: the action must be continuous; got "
                f"{type(distribution).__name__}. Use EpsilonGreedy or Softmax."
            )
        scale = _rows(_value(self.scale, counts), mode.ndim)
        scale = scale * jnp.abs(mode) if self.relative else scale
        action = mode + scale * self._draw(rng_key, mode.shape)
        low: Bound | Array = self.minimum
        high: Bound | Array = self.maximum
        if isinstance(distribution, TanhNormal):
            low = distribution.minimum if low is None else low
            high = distribution.maximum if high is None else high
        action = action if low is None else jnp.maximum(action, jnp.asarray(low, action.dtype))
        return action if high is None else jnp.minimum(action, jnp.asarray(high, action.dtype))

    def _draw(self, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
        raise NotImplementedError


class GaussianNoise(_Noise):
    """The mode plus ``scale`` times a standard normal draw, clipped (DDPG, TD3)."""

    def _draw(self, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(rng_key, shape)


class UniformNoise(_Noise):
    """The mode plus ``scale`` times a uniform draw from [-1, 1], clipped."""

    def _draw(self, rng_key: PRNGKey, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(rng_key, shape, minval=-1.0, maxval=1.0)


def _retemper(distribution: Distribution, temperature: Array, where: str) -> Distribution:
    """Divides the logits of legal choices by ``temperature`` [B], which may be infinite."""
    if isinstance(distribution, Joint):
        return Joint(distribution.map(lambda d: _retemper(d, temperature, where)))
    if not isinstance(distribution, Categorical | MultiCategorical):
        raise WrongKindError(
            f"{where}: the action must be discrete; got {type(distribution).__name__}. "
            "Use Sample, GaussianNoise or UniformNoise."
        )
    # Shift the best logit to 0 first, so that a small temperature cannot make all logits less than
    # ILLEGAL.
    logits = distribution.logits - jnp.max(distribution.logits, axis=-1, keepdims=True)
    logits = logits / _rows(temperature, logits.ndim)
    return distribution._replace(logits=jnp.where(distribution.legal(), logits, ILLEGAL))


def _rows(values: Array, ndim: int) -> Array:
    """Adds trailing axes to [B] values, up to ``ndim`` axes."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def _value(parameter: float | Schedule, counts: Counts) -> Array:
    """Returns a policy's parameter for every row, [B] float32."""
    schedule = parameter if callable(parameter) else Constant(parameter)
    return schedule(counts)
