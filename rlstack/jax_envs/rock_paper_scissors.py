"""Rock, paper, scissors in JAX; see `rlstack.envs.seats.rock_paper_scissors`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.envs.seats.rock_paper_scissors import payoffs
from rlstack.jax_envs.game import GameOutcome
from rlstack.types import Array, PRNGKey, PyTree


class RockPaperScissors:
    """The game of that name for games in Python, with the same rules.

    Observation: ``[1]`` float32, always 1. Action: 0 rock, 1 paper, 2 scissors. Reward: what the
    loser pays, ``rock`` for a win by rock and otherwise 1. An episode is one throw.
    """

    seats = ("first", "second")

    def __init__(self, rock: float = 1.0) -> None:
        if not rock > 0:
            raise ValueError(f"RockPaperScissors: rock must be positive; got {rock}.")
        self._payoffs = payoffs(rock).astype(np.float32)

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the constant."""
        return specs.BoundedArray((1,), np.float32, 1.0, 1.0, "constant")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of a throw."""
        return specs.DiscreteArray(3, np.int32, "throw")

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts a game. Both seats observe that nothing has been thrown; the state is empty."""
        del rng_key
        return (), jnp.ones((2, 1), jnp.float32)

    def step(self, rng_key: PRNGKey, state: PyTree, action: Array) -> GameOutcome:
        """Pays the winner."""
        del rng_key
        paid = jnp.asarray(self._payoffs)[action[0], action[1]]
        reward = jnp.stack([paid, -paid])
        return GameOutcome(state, jnp.ones((2, 1), jnp.float32), reward, jnp.ones(2, bool), True)
