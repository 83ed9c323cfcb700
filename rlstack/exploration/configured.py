"""Builds the policy and the schedule of a `PolicyConfig`; random actions at the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.checks import Checked, WrongKindError
from rlstack.configs.exploration import PolicyConfig
from rlstack.distributions import Distribution, TanhNormal
from rlstack.exploration.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Policy,
    Sample,
    Softmax,
    UniformNoise,
)
from rlstack.exploration.schedules import Exponential, Linear, MultiPhaseLinear, Schedule
from rlstack.types import Array, Counts, PRNGKey

_POLICIES: dict[str, Callable[..., Any]] = {
    "epsilon_greedy": EpsilonGreedy,
    "softmax": Softmax,
    "gaussian_noise": GaussianNoise,
    "uniform_noise": UniformNoise,
}


@dataclasses.dataclass(frozen=True)
class WarmUp(Checked):
    """Takes uniformly random actions for the first frames, then the actions of another policy.

    A discrete action is drawn uniformly from the legal ones. A continuous action is drawn uniformly
    between the bounds of its `TanhNormal`, or from [-1, 1] for other distributions.
    """

    policy: Policy
    "The policy to use afterwards."
    frames: int
    "Number of frames with random actions, in all environments together."
    num_envs: int = 1
    "Number of environments of the experiment."

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "frames")
        self.require("num_envs", self.num_envs > 0, "positive")

    def __call__(self, rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> Array:
        """Returns an action, [B, ...]."""
        chosen = self.policy(rng_key, distribution, counts)
        if not self.frames:
            return chosen
        drawn = _random_action(jax.random.fold_in(rng_key, 1), distribution, counts)
        # Floats, because int32 would overflow when multiplied.
        begun = jnp.asarray(counts.env_steps, jnp.float32) * self.num_envs >= self.frames
        return jnp.where(begun.reshape(begun.shape + (1,) * (chosen.ndim - 1)), chosen, drawn)


def make_policy(cfg: PolicyConfig, num_envs: int) -> Policy:
    """Makes the policy.

    Args:
      cfg: describes it.
      num_envs: number of environments of the experiment, which share the steps.

    Raises:
      ValueError: a value is out of range.
    """
    policy: Policy = Sample()
    if cfg.kind in _POLICIES:
        parameter = cfg.start if cfg.schedule == "constant" else _schedule(cfg, num_envs)
        policy = _POLICIES[cfg.kind](parameter)
    return WarmUp(policy, cfg.warm_up, num_envs) if cfg.warm_up else policy


def _schedule(cfg: PolicyConfig, num_envs: int) -> Schedule:
    scale = num_envs if cfg.over == "env_steps" else 1
    if cfg.schedule == "linear":
        return Linear(cfg.start, cfg.end, cfg.steps, cfg.over, cfg.begin, scale)
    if cfg.schedule == "exponential":
        return Exponential(cfg.start, cfg.end, cfg.half_life, cfg.over, scale)
    if cfg.schedule == "multi_phase":
        return MultiPhaseLinear(cfg.points, cfg.over, scale)
    raise AssertionError(cfg.schedule)


def _random_action(rng_key: PRNGKey, distribution: Distribution, counts: Counts) -> Array:
    mode = distribution.mode()
    if not hasattr(mode, "dtype"):
        raise WrongKindError(
            f"WarmUp: the action must be one array; got {type(mode).__name__}. Set the frames to 0."
        )
    if not jnp.issubdtype(mode.dtype, jnp.floating):
        return EpsilonGreedy(1.0)(rng_key, distribution, counts)
    low: float | Array = -1.0
    high: float | Array = 1.0
    if isinstance(distribution, TanhNormal):
        low, high = distribution.minimum, distribution.maximum
    return low + (high - low) * jax.random.uniform(rng_key, mode.shape)
