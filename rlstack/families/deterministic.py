"""What agents of a deterministic policy and critics share: all but how they learn."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlstack import distributions
from rlstack.exploration import (
    Counts,
    GaussianNoise,
    Policy,
    UniformNoise,
    WarmUp,
    next_counts,
)
from rlstack.families.off_policy import PolicyAndCriticsAgent, PolicyAndCriticsConfig
from rlstack.types import Array, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class DeterministicConfig(PolicyAndCriticsConfig):
    """Hyperparameters that these agents share."""

    noise: Literal["gaussian", "uniform"] = "gaussian"
    """Kind of noise that explores."""
    noise_scale: float = 0.1
    """Standard deviation (gaussian) or largest size (uniform) of that noise, in half-ranges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("noise", self.noise in ("gaussian", "uniform"), "gaussian or uniform")
        self.require_at_least(0, "noise_scale")


class DeterministicOutput(NamedTuple):
    """What acting leaves for learning."""

    action: Array  # [B, D] float32, within the spec's bounds


class DeterministicParams(NamedTuple):
    """What the learner publishes."""

    policy: Params
    critics: Params  # [N, ...]


class DeterministicAgent(PolicyAndCriticsAgent):
    """Acts as its policy says; construct it with `deterministic_policy_and_critic` networks."""

    cfg: DeterministicConfig

    def __init__(self, cfg: DeterministicConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.bounds = distributions.bounds_of(self.action_spec, type(self).__name__)

    def initial_params(self, rng_key: PRNGKey) -> DeterministicParams:
        """Returns fresh networks."""
        policy_key, critics_key = jax.random.split(rng_key)
        return DeterministicParams(
            self.network.policy.init(policy_key), self.critics.init(critics_key)
        )

    def act(self, policy: Params, timestep: TimeStep) -> Array:
        """Returns the policy's action in [-1, 1], ``[B, D]``."""
        return jnp.tanh(self.network.policy.apply(None, policy, timestep, ())[0])

    def actor_step(
        self, rng_key: PRNGKey, params: DeterministicParams, timestep: TimeStep, state: Counts
    ) -> tuple[DeterministicOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps, with noise where the policy has any."""
        certain = distributions.Deterministic(self.act(params.policy, timestep))
        unit = self.policy(rng_key, certain, state)
        return DeterministicOutput(self.bounds.from_unit(unit)), next_counts(state, timestep)


def behaviour_policy(cfg: DeterministicConfig, num_envs: int) -> Policy:
    """Returns a deterministic policy's actions with noise, after random ones at the start."""
    kinds = {"gaussian": GaussianNoise, "uniform": UniformNoise}
    noise = kinds[cfg.noise](cfg.noise_scale, minimum=-1.0, maximum=1.0)
    return WarmUp(noise, cfg.random_frames, num_envs)
