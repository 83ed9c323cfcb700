"""Rewards with noise, or of another scale, as options of any environment or game in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstack.types import Array, PRNGKey, PyTree


class ChangedRewards:
    """An environment or game whose rewards are scaled and noisy; all else is as in the original.

    The wrappers RewardScale and RewardNoise of bsuite (Osband et al. 2020,
    https://arxiv.org/abs/1908.03568) in one.
    """

    def __init__(
        self, env: Any, reward_noise: Array | float = 0.0, reward_scale: Array | float = 1.0
    ) -> None:
        """Stores the environment.

        Args:
          env: the environment.
          reward_noise: the standard deviation of normal noise, drawn for each reward.
          reward_scale: the factor of rewards, before noise is added.
        """
        self._env, self._noise, self._scale = env, reward_noise, reward_scale

    def __getattr__(self, name: str) -> Any:
        if "_env" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(self._env, name)

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> Any:
        """Takes an action, or in a game those of all seats."""
        key, noise_key = jax.random.split(rng_key)
        outcome = self._env.step(key, state, action)
        reward = jnp.asarray(outcome.reward, jnp.float32)
        noise = self._noise * jax.random.normal(noise_key, reward.shape)
        return outcome._replace(reward=self._scale * reward + noise)
