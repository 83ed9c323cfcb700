"""Games of entities as environments in JAX, with the rules of those in `rlstack.entity.games`.

Their specs are those of the games in Python, so the same agents play both. They have no metrics.
`PaddedGame` is what they share: the specs of the game in Python, and observations that fit them.

May import: rlstack, rlstack.entity, rlstack.jax_envs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.entity.environment import Environment
from rlstack.entity.games import count as count_game
from rlstack.entity.games import multi_snake
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.spaces import GLOBAL
from rlstack.jax_envs.environment import Outcome
from rlstack.types import Array, PRNGKey, PyTree

__all__ = ["Count", "MultiSnake"]

_STEPS = np.array(multi_snake.STEPS, np.int32)


class PaddedGame:
    """The specs of a game, and its padded observations; see `rlstack.entity.padded`."""

    def __init__(self, game: Environment) -> None:
        """Computes the specs; ``game`` is the same game in Python."""
        self._codec = PaddedCodec(game.obs_space, game.action_space, type(game).__name__)
        self._capacities = {t: kind.capacity for t, kind in game.obs_space.entities.items()}

    def observation_spec(self) -> PyTree:
        """Returns the specs of the padded arrays."""
        return self._codec.observation_spec

    def action_spec(self) -> PyTree:
        """Returns the specs of the choices by action type, int32 ``[capacity]``."""
        return self._codec.action_spec

    def observe(
        self,
        count: Mapping[str, Array | int],
        actors: Mapping[str, str],
        *,
        features: Mapping[str, Array] | None = None,
        global_features: Array | None = None,
        masks: Mapping[str, Array] | None = None,
    ) -> PyTree:
        """Returns a padded observation, in which all entities are visible.

        Args:
          count: the number of entities, by type.
          actors: the entity type whose entities all act, by action type.
          features: ``[capacity, features]`` by type, for types with features. Rows after the count
            may have any values.
          global_features: ``[global features]``, if the game has some.
          masks: bool ``[capacity, choices]`` by action type; without one every choice is legal.
        """
        present = {t: np.arange(n) < count[t] for t, n in self._capacities.items()}
        arrays: dict[str, Any] = {
            name: jnp.where(jnp.asarray(present[name])[:, None], rows, 0.0).astype(jnp.float32)
            for name, rows in (features or {}).items()
        }
        if global_features is not None:
            arrays[GLOBAL] = global_features[None].astype(jnp.float32)
        slots, legal = {}, {}
        for action, kind in actors.items():
            acting = present[kind]
            first = self._codec.slots.offsets[kind]
            slots[action] = jnp.where(acting, first + np.arange(len(acting)), -1).astype(jnp.int32)
            choices = self._codec.action_spec[action].maximum + 1
            mask = (masks or {}).get(action, jnp.ones((len(acting), choices), bool))
            # Without an actor only choice 0 is legal.
            mask = jnp.where(jnp.asarray(acting)[:, None], mask, np.arange(choices) == 0)
            legal[action] = mask.reshape(-1)
        return {
            "features": arrays,
            "count": {t: jnp.asarray(n, jnp.int32) for t, n in count.items()},
            "visible": {t: jnp.asarray(here) for t, here in present.items()},
            "actors": slots,
            "action_mask": legal,
        }


class CountState(NamedTuple):
    """The state of one game."""

    beans: Array  # [] int32
    legal: Array  # [choices] bool


class Count(PaddedGame):
    """A Player counts Beans; see `rlstack.entity.games.count.Count`."""

    def __init__(self, masked_choices: int = count_game.NUM_CHOICES) -> None:
        """Stores the number of choices that may be legal.

        Raises:
          ValueError: the number is out of range.
        """
        super().__init__(count_game.Count(masked_choices))
        self._masked_choices = masked_choices

    def reset(self, rng_key: PRNGKey) -> tuple[CountState, PyTree]:
        """Draws the number of beans and the legal answers."""
        beans_key, size_key, order_key = jax.random.split(rng_key, 3)
        beans = jax.random.randint(beans_key, (), 0, self._masked_choices)
        size = jax.random.randint(size_key, (), 0, self._masked_choices + 1)
        drawn = jax.random.permutation(order_key, self._masked_choices) < size
        legal = jnp.zeros(count_game.NUM_CHOICES, bool).at[: self._masked_choices].set(drawn)
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


class SnakeState(NamedTuple):
    """The state of one game of S snakes of at most L cells; a cell is ``y * board_size + x``."""

    board: jax.Array  # [cells] int32, as in the game in Python: FREE, BODY or the colour of food
    snakes: jax.Array  # [S, L] int32, the cells of each, from tail to head
    lengths: jax.Array  # [S] int32
    food: jax.Array  # [S] int32, cells
    step: jax.Array  # [] int32


class MultiSnake(PaddedGame):
    """Snakes eat food of their own colour; see `rlstack.entity.games.multi_snake.MultiSnake`.

    The reward is the sum over players, so their number does not matter here.
    """

    def __init__(
        self,
        board_size: int = 10,
        num_snakes: int = 1,
        max_snake_length: int = 11,
        num_steps: int = 180,
    ) -> None:
        """Stores the options of the game.

        Raises:
          ValueError: an option is out of range.
        """
        super().__init__(
            multi_snake.MultiSnake(
                board_size,
                num_snakes,
                max_snake_length=max_snake_length,
                num_steps=num_steps,
            )
        )
        self._size, self._num_snakes = board_size, num_snakes
        self._length, self._num_steps = max_snake_length, num_steps
        self._growth = 1.0 / ((max_snake_length - 1) * num_snakes)

    def reset(self, rng_key: PRNGKey) -> tuple[SnakeState, PyTree]:
        """Places the snakes and the food."""
        number, colours = self._num_snakes, jnp.arange(self._num_snakes)
        board = jnp.full(self._size**2, multi_snake.FREE, jnp.int32)
        contents = jnp.concatenate([jnp.full(number, multi_snake.BODY, jnp.int32), colours])
        board, cells = jax.lax.scan(
            lambda board, drawn: _place(board, *drawn),
            board,
            (jax.random.split(rng_key, 2 * number), contents),
        )
        snakes = jnp.zeros((number, self._length), jnp.int32).at[:, 0].set(cells[:number])
        lengths = jnp.ones(number, jnp.int32)
        state = SnakeState(board, snakes, lengths, cells[number:], jnp.int32(0))
        return state, self._observe(state)

    def step(self, rng_key: PRNGKey, state: SnakeState, action: PyTree) -> Outcome:
        """Moves the snakes one after the other, then places the food that was eaten."""
        colours = jnp.arange(self._num_snakes)
        board, (snakes, lengths, eaten, grown, crashed) = jax.lax.scan(
            self._move, state.board, (colours, state.snakes, state.lengths, action["move"])
        )

        def replace(board: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            key, colour, was_eaten, old = inputs
            after, cell = _place(board, key, colour)
            return jnp.where(was_eaten, after, board), jnp.where(was_eaten, cell, old)

        keys = jax.random.split(rng_key, self._num_snakes)
        board, food = jax.lax.scan(replace, board, (keys, colours, eaten, state.food))
        state = SnakeState(board, snakes, lengths, food, state.step + 1)
        full = (lengths >= self._length).all()
        over = crashed.any() | full | (state.step >= self._num_steps)
        return Outcome(state, self._observe(state), grown.sum() * self._growth, over, False)

    def _move(self, board: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        """Moves one snake on the board.

        Returns:
          The new board; and the snake, its length, and whether it ate, grew and crashed.
        """
        colour, snake, length, choice = inputs
        head = snake[length - 1]
        dx, dy = jnp.asarray(_STEPS)[choice]
        x, y = head % self._size + dx, head // self._size + dy
        inside = (x >= 0) & (x < self._size) & (y >= 0) & (y < self._size)
        cell = jnp.where(inside, y * self._size + x, head)
        content = board[cell]
        crashed = ~inside | ((content != multi_snake.FREE) & (content != colour))
        eats = ~crashed & (content == colour)
        grows = eats & (length < self._length)
        follows = ~crashed & ~grows  # the tail leaves its cell

        after = board.at[cell].set(multi_snake.BODY)
        after = jnp.where(follows, after.at[snake[0]].set(multi_snake.FREE), after)
        # A snake of one cell leaves only its old head.
        shifted = jnp.where(follows, jnp.roll(snake, -1), snake)
        length = length + grows
        moved = shifted.at[length - 1].set(cell)
        outcome = (jnp.where(crashed, snake, moved), length, eats, grows, crashed)
        return jnp.where(crashed, board, after), outcome

    def _observe(self, state: SnakeState) -> PyTree:
        colours = jnp.arange(self._num_snakes)
        heads = state.snakes[colours, state.lengths - 1]
        # The bodies of all snakes, one after the other, without gaps.
        is_body = jnp.arange(self._length) < state.lengths[:, None] - 1
        rows = jnp.cumsum(is_body.reshape(-1)).reshape(is_body.shape) - 1
        capacity = self._num_snakes * (self._length - 1)
        rows = jnp.where(is_body, rows, capacity)  # out of bounds: left out
        features = self._features(state.snakes, jnp.broadcast_to(colours[:, None], rows.shape))
        bodies = jnp.zeros((capacity, 3)).at[rows].set(features, mode="drop")
        number = self._num_snakes
        return self.observe(
            count={"SnakeHead": number, "SnakeBody": is_body.sum(), "Food": number},
            actors={"move": "SnakeHead"},
            features={
                "SnakeHead": self._features(heads, colours),
                "SnakeBody": bodies,
                "Food": self._features(state.food, colours),
            },
            global_features=state.step[None],
        )

    def _features(self, cells: jax.Array, colours: jax.Array) -> jax.Array:
        """Returns x, y and colour of cells, ``[..., 3]`` float32."""
        columns = (cells % self._size, cells // self._size, colours)
        return jnp.stack(columns, axis=-1).astype(jnp.float32)


def _place(board: jax.Array, rng_key: PRNGKey, content: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Puts something on a random free cell; returns the board and the cell."""
    free = jnp.cumsum(board == multi_snake.FREE)
    cell = jnp.argmax(free > jax.random.randint(rng_key, (), 0, free[-1])).astype(jnp.int32)
    return board.at[cell].set(content), cell
