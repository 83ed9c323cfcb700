"""Count in JAX; `rlstack.entity.games.count` has the rules."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstack.entity.games import count
from rlstack.entity.jax_games.padded_game import PaddedGame
from rlstack.jax_envs.environment import Outcome
from rlstack.types import Array, PRNGKey, PyTree


class CountState(NamedTuple):
    """The state of one game."""

    beans: Array  # [] int32
    legal: Array  # [choices] bool


class Count(PaddedGame):
    """A Player counts Beans; see `rlstack.entity.games.count.Count`."""

    def __init__(self, masked_choices: int = count.NUM_CHOICES) -> None:
        """Stores the number of choices that may be legal.

        Raises:
          ValueError: the number is out of range.
        """
        super().__init__(count.Count(masked_choices))
        self._masked_choices = masked_choices

    def reset(self, rng_key: PRNGKey) -> tuple[CountState, PyTree]:
        """Draws the number of beans and the legal answers."""
        beans_key, size_key, order_key = jax.random.split(rng_key, 3)
        beans = jax.random.randint(beans_key, (), 0, self._masked_choices)
        size = jax.random.randint(size_key, (), 0, self._masked_choices + 1)
        drawn = jax.random.permutation(order_key, self._masked_choices) < size
        legal = jnp.zeros(count.NUM_CHOICES, bool).at[: self._masked_choices].set(drawn)
        state = CountState(beans, legal.at[beans].set(True))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: CountState, action: PyTree) -> Outcome:
        """Rewards the right answer."""
        del rng_key
        right = action["count"][0] == state.beans
        return Outcome(state, self._observe(state), right.astype(jnp.float32), True, False)

    def _observe(self, state: CountState) -> PyTree:
        return self.observe(
            count={"Player": 1, "Bean": state.beans},
            actors={"count": "Player"},
            masks={"count": state.legal[None]},
        )
