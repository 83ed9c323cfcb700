"""Small environments in JAX with known answers, for first experiments and measurements."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.types import Array, PRNGKey


class CatchState(NamedTuple):
    """Positions in the board."""

    row: Array  # [] int32, of the ball
    column: Array  # [] int32, of the ball
    paddle: Array  # [] int32, its column


class Catch:
    """A ball falls one row per step; a paddle in the last row moves left, stays or moves right.

    The reward at the end is +1 for a catch and -1 for a miss. With ``pixels`` the board is an image
    of one channel.
    """

    def __init__(self, rows: int = 10, columns: int = 5, pixels: bool = False):
        if rows < 2 or columns < 1:
            raise ValueError(
                f"Catch: rows must be at least 2 and columns at least 1; got {rows} and {columns}."
            )
        self._rows, self._columns, self._pixels = rows, columns, pixels

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the board."""
        if self._pixels:
            return specs.BoundedArray((self._rows, self._columns, 1), np.uint8, 0, 255, "board")
        return specs.BoundedArray((self._rows, self._columns), np.float32, 0.0, 1.0, "board")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the three moves: left, stay, right."""
        return specs.DiscreteArray(3, np.int32, "move")

    def reset(self, rng_key: PRNGKey) -> tuple[CatchState, Array]:
        """Drops a ball from a random column."""
        column = jax.random.randint(rng_key, (), 0, self._columns)
        state = CatchState(jnp.int32(0), column, jnp.int32(self._columns // 2))
        return state, self._board(state)

    def step(self, rng_key: PRNGKey, state: CatchState, action: Array) -> Outcome:
        """Moves the paddle, then lets the ball fall by one row."""
        del rng_key
        paddle = jnp.clip(state.paddle + action - 1, 0, self._columns - 1)
        state = CatchState(state.row + 1, state.column, paddle)
        over = state.row == self._rows - 1
        score = jnp.where(state.column == paddle, 1.0, -1.0)
        return Outcome(state, self._board(state), jnp.where(over, score, 0.0), over, False)

    def _board(self, state: CatchState) -> Array:
        board = jnp.zeros((self._rows, self._columns), jnp.float32)
        board = board.at[state.row, state.column].set(1.0).at[-1, state.paddle].set(1.0)
        return (255 * board[..., None]).astype(jnp.uint8) if self._pixels else board


class DeepSeaState(NamedTuple):
    """The place of the diver."""

    row: Array  # [] int32
    column: Array  # [] int32


class DeepSea:
    """A diver sinks one row per step, and swims to the left or, at a small cost, to the right.

    The treasure is at the end of the last column: only the one episode that always swims to the
    right finds it, and has a return of 0.99. It is Deep Sea of bsuite (Osband et al. 2020,
    https://arxiv.org/abs/1908.03568), deterministic and with the same actions in each row.
    """

    def __init__(self, size: int = 20):
        if size < 2:
            raise ValueError(f"DeepSea: size must be at least 2; got {size}.")
        self._size = size

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the board, which is empty when an episode has ended."""
        return specs.BoundedArray((self._size, self._size), np.float32, 0.0, 1.0, "board")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the two moves: left, right."""
        return specs.DiscreteArray(2, np.int32, "move")

    def reset(self, rng_key: PRNGKey) -> tuple[DeepSeaState, Array]:
        """Puts the diver at the top left."""
        del rng_key
        state = DeepSeaState(jnp.int32(0), jnp.int32(0))
        return state, self._board(state)

    def step(self, rng_key: PRNGKey, state: DeepSeaState, action: Array) -> Outcome:
        """Moves the diver one row down and one column aside."""
        del rng_key
        right = action == 1
        found = right & (state.column == self._size - 1)
        reward = jnp.where(found, 1.0, 0.0) - jnp.where(right, 0.01 / self._size, 0.0)
        column = jnp.clip(state.column + jnp.where(right, 1, -1), 0, self._size - 1)
        state = DeepSeaState(state.row + 1, column)
        return Outcome(state, self._board(state), reward, state.row == self._size, False)

    def _board(self, state: DeepSeaState) -> Array:
        board = jnp.zeros((self._size, self._size), jnp.float32)
        return board.at[state.row, state.column].set(1.0, mode="drop")


class ErrandState(NamedTuple):
    """The state of an errand."""

    distance: Array  # [] int32, from the goal; negative on its left
    time: Array  # [] int32
    fee: Array  # [] float32


class Errand:
    """A walker on a line sees its goal, but not the fee that this episode takes or pays per step.

    It starts up to 8 steps from the goal, and moves left, stays or moves right. A step's reward is
    the episode's fee, uniform in [-fee, fee], minus the distance after the step. No action changes
    the fee, so it is noise for a critic that does not see it; it is an entry of the extras. An
    episode is truncated after 32 steps. The best policy has a mean return of -168 / 17, about -9.9.
    """

    def __init__(self, fee: float = 4.0):
        self._fee = fee

    def observation_spec(self) -> specs.Array:
        """Returns the spec of the distance, in starting distances."""
        return specs.Array((1,), np.float32, "distance")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the three moves: left, stay, right."""
        return specs.DiscreteArray(3, np.int32, "move")

    def extras_spec(self) -> dict[str, specs.Array]:
        """Returns the spec of the fee."""
        return {"fee": specs.Array((), np.float32, "fee")}

    def extras(self, state: ErrandState) -> dict[str, Array]:
        """Returns the fee of the episode."""
        return {"fee": state.fee}

    def reset(self, rng_key: PRNGKey) -> tuple[ErrandState, Array]:
        """Draws a place to start from, and a fee."""
        place_key, fee_key = jax.random.split(rng_key)
        distance = jax.random.randint(place_key, (), -8, 9)
        fee = self._fee * jax.random.uniform(fee_key, (), minval=-1.0, maxval=1.0)
        state = ErrandState(distance, jnp.zeros((), jnp.int32), fee)
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: ErrandState, action: Array) -> Outcome:
        """Moves."""
        del rng_key
        after = ErrandState(state.distance + action - 1, state.time + 1, state.fee)
        reward = after.fee - jnp.abs(after.distance)
        return Outcome(after, self._observe(after), reward, False, after.time == 32)

    def _observe(self, state: ErrandState) -> Array:
        return state.distance[None].astype(jnp.float32) / 8.0


class TollState(NamedTuple):
    """The state of a walk past tolls."""

    toll: Array  # [] float32, of the next gate
    time: Array  # [] int32
    cost: Array  # [] float32, of the last step


class Toll:
    """A walker sees the toll of a gate, uniform in [0, 1], and passes or waits for the next one.

    Passing is rewarded by 1 and costs the toll, an entry ``cost`` of the extras. An episode has 16
    gates. Without a limit the best return is 16, at a mean cost of 8. Under a limit C it is best to
    pass all gates with tolls up to t, where t = sqrt(C / 8), for a return of 16 t: with a limit
    of 2 it is 8. The multiplier is then 1 / t.
    """

    def observation_spec(self) -> specs.Array:
        """Returns the spec of the toll, and of the share of gates left."""
        return specs.Array((2,), np.float32, "toll")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the two choices: wait, pass."""
        return specs.DiscreteArray(2, np.int32, "choice")

    def extras_spec(self) -> dict[str, specs.Array]:
        """Returns the spec of the cost."""
        return {"cost": specs.Array((), np.float32, "cost")}

    def extras(self, state: TollState) -> dict[str, Array]:
        """Returns the cost of the last step."""
        return {"cost": state.cost}

    def reset(self, rng_key: PRNGKey) -> tuple[TollState, Array]:
        """Draws the first toll."""
        state = TollState(jax.random.uniform(rng_key), jnp.int32(0), jnp.float32(0))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: TollState, action: Array) -> Outcome:
        """Passes or waits, and draws the next toll."""
        passes = (action == 1).astype(jnp.float32)
        after = TollState(jax.random.uniform(rng_key), state.time + 1, passes * state.toll)
        return Outcome(after, self._observe(after), passes, after.time == 16, False)

    def _observe(self, state: TollState) -> Array:
        return jnp.stack([state.toll, 1 - state.time.astype(jnp.float32) / 16])
