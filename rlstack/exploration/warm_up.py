"""Random actions at the start of training."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.checks import Checked, WrongKindError
from rlstack.distributions import Distribution, TanhNormal
from rlstack.exploration.policies import EpsilonGreedy, Policy
from rlstack.types import Array, Counts, PRNGKey


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
