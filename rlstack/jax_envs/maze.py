"""Partially observed mazes in JAX for curricula; a number selects a level.

A level is generated from its number alone. The held-out ones are drawn from other keys than those
of training; mazes without walls may be in both. A few are made by hand.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.types import Array, PRNGKey

_MOVES = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]], np.int32)  # up, right, down, left
_VIEW = 5  # side of the square that the walker sees
_SETS = {"train": 0, "held_out": 1}  # folded into the key of a level

# Walls #, start S, goal G.
HANDMADE = tuple(
    text.split()
    for text in (
        # Four rooms.
        "########### #S...#....# #....#....# #.........# #....#....# ##.#####.## #....#....#"
        " #....#....# #.........# #....#...G# ###########",
        # A spiral.
        "########### #S........# #########.# #.......#.# #.#####.#.# #.#G..#.#.# #.###.#.#.#"
        " #.....#.#.# #######.#.# #.........# ###########",
        # One winding corridor.
        "########### #S#...#...# #.#.#.#.#.# #.#.#.#.#.# #.#.#.#.#.# #.#.#.#.#.# #.#.#.#.#.#"
        " #.#.#.#.#.# #.#.#.#.#.# #...#...#G# ###########",
        # A goal behind a long wall.
        "########### #....#....# #.##.#.##.# #.#..#..#.# #.#.###.#.# #S#..#..#G# #.#.###.#.#"
        " #.#..#..#.# #.##.#.##.# #.........# ###########",
    )
)


class MazeState(NamedTuple):
    """A maze and the walker in it."""

    walls: Array  # [S, S] bool
    place: Array  # [2] int32, row and column
    goal: Array  # [2] int32
    move: Array  # [] int32, the last one; -1 before any
    time: Array  # [] int32


class Maze:
    """A walker seeks a goal in a maze; it knows where the goal is, and sees the walls around it.

    The observation is the walls in the five by five squares around the walker (0 and 1), the
    offset of the goal in rows and columns, as shares of the maze's side, and the last move (four
    numbers of 0 and 1): ``[31]``. The four actions are moves; one into a wall does nothing. The
    reward is ``1 - 0.9 t / max_steps`` at the goal, which ends the episode after t steps, as in
    MiniGrid (https://arxiv.org/abs/2306.13831). An episode is truncated after ``max_steps``.

    A maze of ``cells`` by ``cells`` cells is a spanning tree by the binary tree algorithm (Buck
    2015, "Mazes for Programmers"), in one of four orientations. Of the walls that the tree leaves,
    each stays with a probability that is the level's own: the square of a uniform number. So open
    mazes are common, and mazes with a single path rare. ``density`` sets it for all levels.
    ``blocked`` walls in the goal of a share of the levels, as a generator does that draws walls at
    random: no policy can solve these.
    """

    def __init__(
        self,
        cells: int = 5,
        max_steps: int = 100,
        levels: Literal["train", "held_out", "handmade"] = "train",
        density: float | None = None,
        blocked: float = 0.0,
    ):
        """Stores the settings.

        Args:
          cells: cells in a row, at least 2.
          max_steps: the longest episode.
          levels: which levels: those of training, others, or the `HANDMADE` ones of 5 cells, whose
            numbers begin anew behind the last one.
          density: the share of walls that stay in a maze, in [0, 1]; None draws it by level.
          blocked: the share of levels whose goal cannot be reached, in [0, 1]. It changes none of
            the handmade ones.

        Raises:
          ValueError: a setting is out of range.
        """
        if cells < 2 or max_steps < 1:
            raise ValueError(
                "Maze: cells must be at least 2 and max_steps at least 1; got "
                f"{cells} and {max_steps}."
            )
        if levels not in (*_SETS, "handmade"):
            raise ValueError(f"Maze: levels must be train, held_out or handmade; got {levels!r}.")
        if levels == "handmade" and cells != 5:
            raise ValueError(f"Maze: cells must be 5 with the handmade levels; got {cells}.")
        for name, share in (("density", density), ("blocked", blocked)):
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"Maze: {name} must lie in [0, 1]; got {share}.")
        self._cells, self._max_steps = cells, max_steps
        self._levels, self._density, self._blocked = levels, density, blocked

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the walls in view, the offset of the goal, and the last move."""
        size = _VIEW**2 + 2 + len(_MOVES)
        return specs.BoundedArray((size,), np.float32, -1.0, 1.0, "view")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the moves: up, right, down, left."""
        return specs.DiscreteArray(len(_MOVES), np.int32, "move")

    def reset(self, rng_key: PRNGKey) -> tuple[MazeState, Array]:
        """Begins a level at random."""
        number_key, key = jax.random.split(rng_key)
        number = jax.random.randint(number_key, (), 0, np.iinfo(np.int32).max)
        return self.reset_with_index(key, number)

    def reset_with_index(self, rng_key: PRNGKey, index: Array) -> tuple[MazeState, Array]:
        """Begins the level of a number; the key is not used."""
        del rng_key
        state = self._handmade(index) if self._levels == "handmade" else self._generated(index)
        return state, self._seen(state)

    def step(self, rng_key: PRNGKey, state: MazeState, action: Array) -> Outcome:
        """Moves, unless there is a wall."""
        del rng_key
        to = state.place + jnp.asarray(_MOVES)[action]
        place = jnp.where(state.walls[to[0], to[1]], state.place, to)
        time = state.time + 1
        after = state._replace(place=place, move=jnp.asarray(action, jnp.int32), time=time)
        there = (place == state.goal).all()
        reward = jnp.where(there, 1.0 - 0.9 * time / self._max_steps, 0.0)
        return Outcome(after, self._seen(after), reward, there, time >= self._max_steps)

    def render(self, state: MazeState) -> str:
        """Returns a picture of the maze in text: walls #, the goal G and the walker @."""
        rows = [["#" if wall else "." for wall in row] for row in np.asarray(state.walls)]
        for (row, column), mark in ((state.goal, "G"), (state.place, "@")):
            rows[int(row)][int(column)] = mark
        return "\n".join(map("".join, rows))

    def _generated(self, index: Array) -> MazeState:
        key = jax.random.fold_in(jax.random.PRNGKey(_SETS[self._levels]), index)
        tree_key, flip_key, wall_key, density_key, place_key, block_key = jax.random.split(key, 6)
        cells = self._cells
        # Each cell has a passage up or left; along two borders there is only one choice.
        up = jax.random.bernoulli(tree_key, shape=(cells, cells))
        up = up.at[0].set(False).at[:, 0].set(True)
        left = (~up).at[0].set(True)
        flips = jax.random.bernoulli(flip_key, shape=(2,))
        drawn = jax.random.uniform(density_key) ** 2
        density: Array | float = drawn if self._density is None else self._density
        stay = jax.random.bernoulli(wall_key, density, (2, cells, cells))
        size = 2 * cells + 1
        walls = jnp.ones((size, size), bool).at[1::2, 1::2].set(False)
        walls = walls.at[2:-1:2, 1::2].set((~up & stay[0])[1:])
        walls = walls.at[1::2, 2:-1:2].set((~left & stay[1])[:, 1:])
        walls = jnp.where(flips[0], walls[::-1], walls)
        walls = jnp.where(flips[1], walls[:, ::-1], walls)
        number = cells**2
        first_key, second_key = jax.random.split(place_key)
        start = jax.random.randint(first_key, (), 0, number)
        goal = (start + jax.random.randint(second_key, (), 1, number)) % number
        place, goal = (
            jnp.stack([2 * (x // cells) + 1, 2 * (x % cells) + 1]) for x in (start, goal)
        )
        around = goal + _MOVES
        walled_in = walls.at[around[:, 0], around[:, 1]].set(True)
        blocked = jax.random.bernoulli(block_key, self._blocked)
        return _begun(jnp.where(blocked, walled_in, walls), place, goal)

    def _handmade(self, index: Array) -> MazeState:
        drawn = np.array([[list(row) for row in rows] for rows in HANDMADE])
        starts, goals = (np.argwhere(drawn == mark)[:, 1:].astype(np.int32) for mark in ("S", "G"))
        chosen = index % len(HANDMADE)
        return _begun(*(jnp.asarray(x)[chosen] for x in (drawn == "#", starts, goals)))

    def _seen(self, state: MazeState) -> Array:
        walls = jnp.pad(state.walls, _VIEW // 2, constant_values=True)
        around = jax.lax.dynamic_slice(walls, (state.place[0], state.place[1]), (_VIEW, _VIEW))
        offset = (state.goal - state.place) / len(state.walls)
        move = jnp.arange(len(_MOVES)) == state.move
        return jnp.concatenate([around.reshape(-1), offset, move]).astype(jnp.float32)


def _begun(walls: Array, place: Array, goal: Array) -> MazeState:
    return MazeState(
        walls,
        jnp.asarray(place, jnp.int32),
        jnp.asarray(goal, jnp.int32),
        jnp.full((), -1, jnp.int32),
        jnp.zeros((), jnp.int32),
    )
