"""The protocol of games with several seats in JAX, and batches of such games.

A row of a batch is a seat (`BatchedGame`) or a whole game (`JointGame`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp

from rlstack.checks import EnvError
from rlstack.envs.seats.joint import joined, joint_spec
from rlstack.jax_envs.environment import BatchedEnv, BatchState, step_types
from rlstack.types import Array, PRNGKey, PyTree, StepType, TimeStep, merge_leading_dims


class GameOutcome(NamedTuple):
    """The result of one step of one game of S seats."""

    state: PyTree
    observation: PyTree  # [S, ...] of each seat
    reward: Array  # [S] float32
    # Whether a seat leaves the game, because no reward can follow; it stays True until the end.
    terminated: Array  # [S] bool
    # Whether the game is over, for all seats; it also is when all have left.
    over: Array | bool  # [] bool


class JaxGame(Protocol):
    """A game in which all seats act at the same time, as pure functions that JAX can compile.

    An object holds only settings, as that of a `rlstack.jax_envs.environment.JaxEnv`. Methods
    ``state_spec()`` and ``critic_state(state)`` may show the whole state, for a critic that sees
    more than a seat does. ``extras_spec()`` and ``extras(state)`` are optional as those of a
    `JaxEnv`; extras are ``[S, ...]`` of each seat. So are ``render`` and ``render_fps``.
    """

    @property
    def seats(self) -> Sequence[str]:
        """A name for each seat; names may repeat."""

    def observation_spec(self) -> PyTree:
        """Returns the specs of one seat's observation, the same for all seats."""

    def action_spec(self) -> PyTree:
        """Returns the specs of one seat's action, the same for all seats."""

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts a game; returns its state and the first observations ``[S, ...]``."""

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> GameOutcome:
        """Takes the actions ``[S, ...]`` of all seats.

        The observations are those of the game that the actions belong to, also where it is over.
        """


def is_game(env: Any) -> TypeGuard[JaxGame]:
    """Returns whether an environment in JAX is a game of several seats."""
    return hasattr(env, "seats")


class BatchedGame(BatchedEnv):
    """Many copies of one game; row ``S i + j`` is seat j of game i.

    A seat that leaves its game is LAST then, with discount 0. Its row is FIRST with reward 0 until
    the next game, so it makes no transition.

    Attributes:
      num_seats: S, the number of seats of a game.
      name: the name of the game's class, for errors.
    """

    def __init__(self, game: JaxGame) -> None:
        """Stores the game, and compares its functions with its specs.

        Raises:
          EnvError: as in `BatchedEnv`, where the game's results have an axis of seats.
        """
        self.num_seats, self.name = len(game.seats), type(game).__name__
        super().__init__(game, (self.num_seats,))  # type: ignore[arg-type]

    def reset(self, rng_key: PRNGKey) -> tuple[BatchState, TimeStep]:
        """Starts all games; each has the key of its first seat.

        Args:
          rng_key: ``[B, ...]``, as for `BatchedEnv.reset`.

        Raises:
          EnvError: B is no multiple of the number of seats.
        """
        rows = rng_key.shape[0]
        if rows % self.num_seats:
            raise EnvError(
                f"JAX game {self.name}: every {self.num_seats} consecutive environments are the "
                f"seats of one game; got {rows} environments. Make their number a multiple of "
                f"{self.num_seats}."
            )
        next_key, env, observation = jax.vmap(self._first)(rng_key[:: self.num_seats])
        ones = jnp.ones(rows, jnp.float32)
        timestep = TimeStep(
            jnp.full(rows, StepType.FIRST, jnp.int32),
            0 * ones,
            ones,
            self._rows(observation),
            self._rows(self._extras(env)),
        )
        return BatchState(env, self._spread(next_key), jnp.zeros(rows, bool)), timestep

    def step(self, state: BatchState, action: PyTree) -> tuple[BatchState, TimeStep]:
        """Steps every game; those at LAST ignore their actions and start anew.

        Args:
          state: the state of the games. Arrays of a game are ``[B / S, ...]``, arrays of rows
            ``[B, ...]``.
          action: ``[B, ...]`` in the structure of ``spec.action``.
        """
        by_game = jax.tree.map(lambda x: x.reshape((-1, self.num_seats, *x.shape[1:])), action)
        # A row is over from the step in which its seat leaves; a game is when all its rows are.
        keys, over = state.rng_key[:: self.num_seats], jnp.asarray(state.over)
        begins = over.reshape((-1, self.num_seats)).all(axis=1)
        next_key, outcome, env, observation = self._advance(keys, begins, state.env, by_game)
        reward = jnp.asarray(outcome.reward, jnp.float32)
        terminated = self._rows(jnp.asarray(outcome.terminated, bool)) & ~over
        ends = (terminated | self._spread(jnp.asarray(outcome.over, bool))) & ~over
        # With a weak type, a compiled loop would be compiled again for its own results.
        timestep = TimeStep(
            step_types(over, ends),
            jnp.where(over, 0.0, self._rows(reward)),
            jnp.where(terminated, 0.0, 1.0).astype(jnp.float32),
            self._rows(observation),
            self._rows(self._extras(env)),
        )
        over = (over & ~self._spread(begins)) | ends
        return BatchState(env, self._spread(next_key), over), timestep

    def _one(self, env: PyTree, row: int) -> PyTree:
        return super()._one(env, row // self.num_seats)

    def _rows(self, by_game: PyTree) -> PyTree:
        """Turns ``[B / S, S, ...]`` into ``[B, ...]``."""
        return merge_leading_dims(by_game)

    def _spread(self, of_games: Array) -> Array:
        """Repeats what belongs to a game, ``[B / S, ...]``, for each of its seats."""
        return jnp.repeat(of_games, self.num_seats, axis=0)


class JointGame(BatchedEnv):
    """Many copies of one game of S seats; a row is a game, which has a key of its own.

    See `rlstack.envs.seats.joint`.

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
