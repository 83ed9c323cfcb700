"""TicTacToe and Connect Four in JAX, which a planning agent can also have as its model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.game import GameOutcome
from rlstack.types import Array, PRNGKey

_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


class BoardState(NamedTuple):
    """The state of a game."""

    stones: Array  # [2, rows, columns] bool, of each seat
    turn: Array  # [] int32, the seat whose turn it is


class RowGame:
    """Two seats put stones on a board in turn; a row of them wins. A subclass has the rules.

    Both seats take every step, so the one whose turn it is not has one legal action, to wait. What
    it chooses changes nothing.

    Observation: ``board`` float32 ``[rows, columns, 2]``: 1 where the seat has a stone and, in the
    second plane, where the other seat has one; ``turn`` float32 ``[1]``, 1 if it is the seat's
    turn; ``action_mask`` int8 ``[N + 1]``, 1 for a legal action. Action: 0 to N - 1 a place, N to
    wait. Reward: 1 for the winner and -1 for the loser, in the step of the last stone, which ends
    the game for both seats. A full board is a draw. An illegal action loses the game.

    `turn`, `observe` and `state_of` make it a model for `rlstack.agents.alphazero`.
    """

    seats = ("first", "second")
    rows: int
    columns: int
    length: int  # stones of a row that wins
    places: int  # N

    def observation_spec(self) -> dict[str, specs.BoundedArray]:
        """Returns the specs of the entries."""
        board = (self.rows, self.columns, 2)
        return {
            "board": specs.BoundedArray(board, np.float32, 0.0, 1.0, "board"),
            "turn": specs.BoundedArray((1,), np.float32, 0.0, 1.0, "turn"),
            "action_mask": specs.BoundedArray((self.places + 1,), np.int8, 0, 1, "action_mask"),
        }

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of a place, or to wait."""
        return specs.DiscreteArray(self.places + 1, np.int32, "place")

    def reset(self, rng_key: PRNGKey) -> tuple[BoardState, dict[str, Array]]:
        """Empties the board; the first seat begins."""
        del rng_key
        state = BoardState(jnp.zeros((2, self.rows, self.columns), bool), jnp.int32(0))
        return state, self.observe(state)

    def step(self, rng_key: PRNGKey, state: BoardState, action: Array) -> GameOutcome:
        """Puts a stone of the seat whose turn it is; actions are ``[2]``."""
        del rng_key
        mover, place = state.turn, action[state.turn]
        is_mover = jnp.arange(2) == mover
        legal = (jnp.arange(self.places) == place) & self.free(state.stones)
        cell = self.cell(state.stones, place) & legal.any()
        stones = state.stones | (is_mover[:, None, None] & cell)
        after = BoardState(stones, 1 - mover)
        wins = has_row(stones[mover], self.length)
        decided = wins | ~legal.any()
        over = decided | stones.any(axis=0).all()
        reward = jnp.where(is_mover == wins, 1.0, -1.0) * decided
        return GameOutcome(after, self.observe(after), reward, jnp.full(2, over), over)

    def turn(self, state: BoardState) -> Array:
        """Returns the seat whose turn it is, [] int32."""
        return state.turn

    def observe(self, state: BoardState) -> dict[str, Array]:
        """Returns what each seat sees, ``[2, ...]``."""
        own = jnp.stack([state.stones, state.stones[::-1]], axis=-1).astype(jnp.float32)
        moves = jnp.arange(2) == state.turn
        free = moves[:, None] & self.free(state.stones)
        mask = jnp.concatenate([free, ~moves[:, None]], axis=1)
        return {
            "board": own,
            "turn": moves[:, None].astype(jnp.float32),
            "action_mask": mask.astype(jnp.int8),
        }

    def state_of(self, observation: dict[str, Array]) -> BoardState:
        """Returns the state in which the first seat sees an observation."""
        stones = jnp.moveaxis(jnp.asarray(observation["board"]) > 0.5, -1, 0)
        moves = jnp.asarray(observation["turn"])[0] > 0.5
        return BoardState(stones, jnp.where(moves, 0, 1).astype(jnp.int32))

    def free(self, stones: Array) -> Array:
        """Returns in which places a stone can be put, ``[N]`` bool."""
        raise NotImplementedError

    def cell(self, stones: Array, place: Array) -> Array:
        """Returns the cell of a stone in a place that is free, bool ``[rows, columns]``."""
        raise NotImplementedError

    def render(self, state: BoardState) -> str:
        """Returns the board, the last row first: X has the first seat, O the second."""
        first, second = np.asarray(state.stones)[:, ::-1]
        marks = np.where(first, "X", np.where(second, "O", "."))
        return "\n".join(" ".join(row) for row in marks)


class TicTacToe(RowGame):
    """Three stones in a row on a board of 3 x 3 cells win; place 3 r + c is cell (r, c).

    Two perfect players draw.
    """

    rows, columns, length, places = 3, 3, 3, 9

    def free(self, stones: Array) -> Array:
        """Returns which cells are empty, ``[9]`` bool."""
        return ~stones.any(axis=0).ravel()

    def cell(self, stones: Array, place: Array) -> Array:
        """Returns the cell of this number."""
        del stones
        return (jnp.arange(9) == place).reshape(3, 3)


class ConnectFour(RowGame):
    """Stones dropped into 7 columns of 6 cells; four in a row win. Row 0 is the lowest.

    It has the rules, observations and actions of `rlstack.envs.seats.connect_four.ConnectFour`.
    """

    rows, columns, length, places = 6, 7, 4, 7

    def free(self, stones: Array) -> Array:
        """Returns which columns are not full, ``[7]`` bool."""
        return ~stones.any(axis=0)[-1]

    def cell(self, stones: Array, place: Array) -> Array:
        """Returns the lowest empty cell of a column."""
        heights = stones.any(axis=0).sum(axis=0)
        lowest = jnp.arange(self.rows)[:, None] == heights
        return lowest & (jnp.arange(self.columns) == place)


def has_row(stones: Array, length: int) -> jax.Array:
    """Returns whether stones, bool ``[rows, columns]``, have a row of this length, [] bool."""
    rows, columns = stones.shape
    found = jnp.zeros((), bool)
    for down, right in _DIRECTIONS:
        board = stones[:, ::-1] if right < 0 else stones
        height, width = rows - (length - 1) * down, columns - (length - 1) * abs(right)
        if min(height, width) < 1:
            continue
        run = jnp.ones((height, width), bool)
        for i in range(length):
            top, left = i * down, i * abs(right)
            run &= board[top : top + height, left : left + width]
        found |= run.any()
    return found
