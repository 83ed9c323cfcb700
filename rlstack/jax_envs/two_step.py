"""The two-step game, which tells learners of joint values by their class of functions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.game import GameOutcome
from rlstack.types import Array, PRNGKey, PyTree

# By the second state and the actions of both agents: what the team is paid (paper, table 1).
PAID = np.array([[[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)


class TwoStepState(NamedTuple):
    """The state of a game."""

    place: Array  # [] int32: 0 at first, then 1 (2A) or 2 (2B)


class TwoStep:
    """The two-step game of Rashid et al. (2018), arXiv:1803.11485, section 5.

    In the first step, which pays nothing, the first agent's action leads to state 2A or 2B. In the
    second step the team is paid 7 in 2A, whatever both do; in 2B it is paid 8 if both take the
    second action, 1 if one does, and 0 otherwise. So the best return is 8. A sum of values of the
    agents cannot represent 2B, and values it below 7.

    Observation, also the state for a critic: ``[3]`` float32, the state as one-hot. Both agents get
    the team's reward.
    """

    seats = ("first", "second")

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the state as one-hot."""
        return specs.BoundedArray((3,), np.float32, 0.0, 1.0, "state")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the action."""
        return specs.DiscreteArray(2, np.int32, "action")

    def state_spec(self) -> specs.BoundedArray:
        """Returns the spec of the state as one-hot."""
        return self.observation_spec()

    def critic_state(self, state: TwoStepState) -> Array:
        """Returns the state as one-hot."""
        return jax.nn.one_hot(state.place, 3)

    def reset(self, rng_key: PRNGKey) -> tuple[TwoStepState, PyTree]:
        """Starts a game."""
        del rng_key
        state = TwoStepState(jnp.int32(0))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: TwoStepState, action: Array) -> GameOutcome:
        """Takes the actions of both agents."""
        del rng_key
        ends = state.place > 0
        paid = jnp.asarray(PAID)[jnp.maximum(state.place - 1, 0), action[0], action[1]]
        after = TwoStepState(jnp.where(ends, state.place, 1 + action[0]).astype(jnp.int32))
        reward = jnp.where(ends, paid, 0.0)
        return GameOutcome(
            after, self._observe(after), jnp.stack([reward, reward]), jnp.stack([ends, ends]), ends
        )

    def _observe(self, state: TwoStepState) -> Array:
        return jnp.stack([self.critic_state(state)] * 2)
