"""Games in JAX as one row each; see `rlstack.envs.seats.joint`."""

from __future__ import annotations

import jax.numpy as jnp

from rlstack.envs.seats.joint import joined, joint_spec
from rlstack.jax_envs.environment import BatchedEnv, BatchState
from rlstack.jax_envs.game import BatchedGame, JaxGame
from rlstack.types import PRNGKey, PyTree, TimeStep, merge_leading_dims


class JointGame(BatchedEnv):
    """Many copies of one game of S seats; a row is a game, which has a key of its own.

    Attributes:
      num_seats: S.
    """

    def __init__(self, game: JaxGame) -> None:
        """Stores the game.

        Raises:
          EnvError: as in `BatchedGame`.
          ValueError: as in `joint_spec`.
        """
        self._game, self._env = BatchedGame(game), game  # type: ignore[assignment]
        self.num_seats = self._game.num_seats
        self.spec = joint_spec(self._game.spec, self.num_seats, f"JAX game {self._game.name}")

    def reset(self, rng_key: PRNGKey) -> tuple[BatchState, TimeStep]:
        """Starts a game in every row; see `BatchedEnv.reset`."""
        state, rows = self._game.reset(self._for_seats(rng_key))
        begins = jnp.ones(len(rng_key), bool)
        return self._by_game(state), joined(rows, self.num_seats, begins, jnp)

    def step(self, state: BatchState, action: PyTree) -> tuple[BatchState, TimeStep]:
        """Steps every game; those at LAST ignore their actions and start anew.

        Args:
          state: the state of the games, in which ``over`` is of the seats, ``[B, S]``.
          action: ``[B, S, ...]``.
        """
        begins = state.over.all(axis=1)
        of_seats = BatchState(state.env, self._for_seats(state.rng_key), state.over.ravel())
        flat = merge_leading_dims(action)
        after, rows = self._game.step(of_seats, flat)
        return self._by_game(after), joined(rows, self.num_seats, begins, jnp)

    def _for_seats(self, rng_key: PRNGKey) -> PRNGKey:
        return jnp.repeat(rng_key, self.num_seats, axis=0)

    def _by_game(self, state: BatchState) -> BatchState:
        """Returns the state of the rows of seats with games as the first axis of all arrays."""
        over = state.over.reshape((-1, self.num_seats))
        return BatchState(state.env, state.rng_key[:: self.num_seats], over)
