"""Random actions at the start, before a policy knows anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.checks import Checked
from rlstack.distributions import TanhNormal
from rlstack.exploration.policies import EpsilonGreedy, Policy
from rlstack.exploration.schedules import Counts
from rlstack.types import Array, PRNGKey


@dataclasses.dataclass(frozen=True)
class WarmUp(Checked):
    """Any action, all alike, for the first frames; then what another policy chooses.

    A discrete action is drawn among the legal ones, a continuous one from the bounds of its
    `TanhNormal`, or from [-1, 1] where the distribution has none.
    """

    policy: Policy
    "What chooses afterwards."
    frames: int
    "Frames, of all environments together, of random actions."
    num_envs: int = 1
    "Environments of the experiment."

    def __post_init__(self):
        self.require_at_least(0, "frames")
        self.require("num_envs", self.num_envs > 0, "positive")

    def __call__(self, rng_key: PRNGKey, distribution: Any, counts: Counts) -> Array:
        """Returns an action, [B, ...]."""
        chosen = self.policy(rng_key, distribution, counts)
        if not self.frames:
            return chosen
        drawn = _any_action(jax.random.fold_in(rng_key, 1), distribution, counts)
        # Floats, because int32 would overflow when multiplied.
        begun = jnp.asarray(counts.env_steps, jnp.float32) * self.num_envs >= self.frames
        return jnp.where(begun.reshape(begun.shape + (1,) * (chosen.ndim - 1)), chosen, drawn)


def _any_action(rng_key: PRNGKey, distribution: Any, counts: Counts) -> Array:
    mode = distribution.mode()
    if not jnp.issubdtype(mode.dtype, jnp.floating):
        return EpsilonGreedy(1.0)(rng_key, distribution, counts)
    low: Any = -1.0
    high: Any = 1.0
    if isinstance(distribution, TanhNormal):
        low, high = distribution.minimum, distribution.maximum
    return low + (high - low) * jax.random.uniform(rng_key, mode.shape)
