"""Environments with goals: by hand, and their functions with numpy as with JAX."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.jax_envs.goals import BitFlip, Reach, bits_reward, has_bits, point_reward
from rlstack.types import StepType

FIRST, MID, LAST = map(int, StepType)
NAMES = ["achieved_goal", "desired_goal", "observation"]


def test_flipping_the_wrong_bits_ends_an_episode_and_others_truncate_it():
    """Half of the environments flip each wrong bit once, the others one bit for ever."""
    with SyncEnv(BitFlip, 200, "jax", options={"bits": 4}) as env:
        timestep = env.reset()
        begin = timestep.observation
        assert sorted(begin) == NAMES
        np.testing.assert_array_equal(begin["observation"], begin["achieved_goal"])
        assert set(np.unique(begin["desired_goal"])) == {0, 1}
        wrong = begin["observation"] != begin["desired_goal"]
        seeks, over = np.arange(200) % 2 == 0, np.zeros(200, bool)
        assert set(wrong.sum(1)) == {0, 1, 2, 3, 4}
        for time in range(1, 5):
            left = timestep.observation["observation"] != timestep.observation["desired_goal"]
            timestep = env.step(np.where(seeks, left.argmax(1), 0).astype(np.int32))
            there = (timestep.observation["observation"] == begin["desired_goal"]).all(1)
            at = ~over  # in their first episode
            np.testing.assert_array_equal(timestep.reward[at], np.where(there, 0, -1)[at])
            np.testing.assert_array_equal(timestep.discount[at], np.where(there, 0, 1)[at])
            ends = there | (time == 4)
            np.testing.assert_array_equal(timestep.step_type[at] == LAST, ends[at])
            sought = at & seeks & (wrong.sum(1) > 0)
            np.testing.assert_array_equal(there[sought], (wrong.sum(1) == time)[sought])
            over |= ends


def test_a_point_moves_by_a_tenth_within_the_cube_and_goes_on_at_the_goal():
    with SyncEnv(Reach, 300, "jax", options={"dimensions": 2}) as env:
        timestep = env.reset()
        for time in range(1, 51):
            place, goal = timestep.observation["observation"], timestep.observation["desired_goal"]
            action = np.clip((goal - place) / 0.1, -1, 1).astype(np.float32)
            action[::3] = [5.0, -1.0]  # clipped
            timestep = env.step(action)
            moved = place + 0.1 * np.clip(action, -1, 1)
            seen = timestep.observation
            np.testing.assert_allclose(seen["observation"], np.clip(moved, -1, 1), atol=1e-6)
            np.testing.assert_array_equal(seen["desired_goal"], goal)
            distance = np.linalg.norm(seen["achieved_goal"] - goal, axis=1)
            clear = abs(distance - 0.1) > 1e-5
            np.testing.assert_array_equal(
                timestep.reward[clear], np.where(distance <= 0.1, 0, -1)[clear]
            )
            assert (timestep.step_type == (LAST if time == 50 else MID)).all()
            assert (timestep.discount == 1).all()
        assert (timestep.reward[1::3] == 0).all()


@pytest.mark.parametrize("xp", [np, jnp])
def test_functions_take_goals_of_numpy_and_of_jax(xp):
    achieved = xp.asarray([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    desired = xp.asarray([[0.0, 1.0], [0.0, 1.0], [0.0, 0.099]])
    assert has_bits(achieved, desired, {}).tolist() == [True, False, False]
    assert bits_reward(achieved, desired, {}).tolist() == [0, -1, -1]
    assert point_reward(achieved, desired, {}).tolist() == [0, -1, 0]


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="BitFlip: bits must be at least 1; got 0"):
        BitFlip(0)
    with pytest.raises(ValueError, match="Reach: dimensions must be at least 1; got 0"):
        Reach(0)
