"""Mazes: levels by number, that all can be solved, and steps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.jax_envs.maze import HANDMADE, Maze
from rlstack.types import StepType
from tests.agent_cases import quick_jit

FIRST, MID, LAST = map(int, StepType)
UP, RIGHT, DOWN, LEFT = range(4)
KEY = jax.random.PRNGKey(0)


def levels(env, numbers):
    state, _ = quick_jit(jax.vmap(lambda i: env.reset_with_index(KEY, i)))(jnp.array(numbers))
    return jax.tree.map(np.asarray, state)


def distance(walls, place, goal):
    """Moves from a place to the goal; None without a way."""
    reached, edge = {tuple(place): 0}, [tuple(place)]
    for row, column in edge:
        for to in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if not walls[to] and to not in reached:
                reached[to] = reached[row, column] + 1
                edge.append(to)
    return reached.get(tuple(goal))


@pytest.mark.parametrize(
    "cells", [2, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.chosen])]
)
def test_every_level_can_be_solved_unless_it_is_blocked(cells):
    state = levels(Maze(cells=cells), range(100))
    found = [distance(*level) for level in zip(state.walls, state.place, state.goal, strict=True)]
    assert min(found) >= 2
    assert state.walls.shape == (100, 2 * cells + 1, 2 * cells + 1)
    assert state.walls[:, 0].all() and state.walls[:, :, -1].all()
    blocked = levels(Maze(cells=cells, blocked=0.5), range(100))
    walls = zip(blocked.walls, blocked.place, blocked.goal, strict=True)
    lost = np.array([distance(*level) is None for level in walls])
    assert 35 < lost.sum() < 65
    np.testing.assert_array_equal(blocked.walls[~lost], state.walls[~lost])


def test_full_density_is_a_tree_and_none_has_pillars_only():
    """A spanning tree of 25 cells has 24 passages, so 49 squares are open."""
    full = levels(Maze(density=1.0, levels="held_out"), range(20))
    assert (~full.walls).sum((1, 2)).tolist() == [49] * 20
    empty = levels(Maze(density=0.0), range(3))
    assert (~empty.walls).sum((1, 2)).tolist() == [81 - 16] * 3
    # All four orientations: which of the borders is one corridor.
    sides = {(bool(w[1, 1:-1].any()), bool(w[1:-1, 1].any())) for w in full.walls}
    assert len(sides) == 4


@pytest.mark.slow
@pytest.mark.chosen
def test_a_number_is_one_maze_and_held_out_levels_are_others():
    one, same = levels(Maze(), range(50)), levels(Maze(), [7])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[7], y[0]), one, same)
    other = levels(Maze(levels="held_out"), range(50))
    text = {s.walls.tobytes() + s.place.tobytes() for s in (one, other)}
    assert len(text) == 2
    whole = zip(one.walls, one.place, one.goal, strict=True)
    assert len({b"".join(x.tobytes() for x in level) for level in whole}) > 45
    open_squares = (~one.walls).sum((1, 2))
    assert open_squares.max() > 62 and open_squares.min() < 54


def test_handmade_mazes_can_be_solved_and_repeat():
    env = Maze(levels="handmade")
    state = levels(env, range(len(HANDMADE) + 1))
    found = [distance(*level) for level in zip(state.walls, state.place, state.goal, strict=True)]
    assert found[0] == found[-1] == 16
    assert found[1:4] == [42, 48, 16]
    assert env.render(jax.tree.map(lambda x: x[0], state)).splitlines()[1] == "#@...#....#"


def test_steps_by_hand():
    """In the first handmade maze, a move to the right succeeds and a move up hits a wall."""
    env = Maze(levels="handmade", max_steps=20)
    state, view = env.reset_with_index(KEY, jnp.int32(0))
    walls, offset, move = np.split(np.asarray(view), [25, 27])
    assert walls.reshape(5, 5).tolist() == [[1] * 5, [1] * 5, *[[1, 1, 0, 0, 0]] * 3]
    np.testing.assert_allclose(offset, [8 / 11, 8 / 11])
    assert not move.any()
    outcome = env.step(KEY, state, jnp.int32(RIGHT))
    assert outcome.state.place.tolist() == [1, 2]
    outcome = env.step(KEY, outcome.state, jnp.int32(UP))
    assert outcome.state.place.tolist() == [1, 2]
    np.testing.assert_allclose(outcome.observation[25:], [8 / 11, 7 / 11, 1, 0, 0, 0])
    assert not outcome.terminated and not outcome.truncated


def test_the_reward_falls_with_time_and_the_end_is_a_truncation():
    """The way through the rooms: two down, seven right, ... 16 moves in all, of 20."""
    way = [DOWN] * 2 + [RIGHT] * 7 + [DOWN] * 6 + [RIGHT]
    options = {"levels": "handmade", "max_steps": 20}
    with SyncEnv(Maze, 2, "jax", options=options, first_index=0) as env:
        assert env.reset().first().all()
        for time, move in enumerate(way, 1):
            step = env.step(np.array([move, UP], np.int32))
            assert step.step_type.tolist() == [LAST if time == 16 else MID, MID]
        np.testing.assert_allclose(step.reward, [1 - 0.9 * 16 / 20, 0], rtol=1e-6)
        assert step.discount.tolist() == [0, 1]
        for _ in range(4):
            step = env.step(np.array([UP, UP], np.int32))
        assert step.step_type[1] == LAST and step.discount[1] == 1


def test_wrong_settings():
    for wrong in (
        {"cells": 1},
        {"max_steps": 0},
        {"levels": "own"},
        {"density": 2.0},
        {"blocked": 2.0},
    ):
        with pytest.raises(ValueError, match="Maze: "):
            Maze(**wrong)
    with pytest.raises(ValueError, match="cells must be 5"):
        Maze(cells=4, levels="handmade")
