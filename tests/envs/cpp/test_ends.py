"""Ends of EnvPool's environments in the step of their limit: a termination wins."""

import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.envs.cpp.backend import natural_end

pytest.importorskip("envpool")
LAST = 2


def steps_to_end(limit):
    """Pushes a cart to the right until its episode ends; returns the steps and the discount."""
    with SyncEnv("CartPole-v1", 1, "cpp", options={"max_episode_steps": limit}) as env:
        env.reset()
        for step in range(1, 100):
            timestep = env.step(np.ones(1, np.int32))
            if timestep.step_type[0] == LAST:
                return step, float(timestep.discount[0])
    return 0, -1.0


def test_a_fall_in_the_step_of_the_limit_is_a_termination():
    fall, discount = steps_to_end(500)
    assert fall > 5 and discount == 0.0
    assert steps_to_end(fall) == (fall, 0.0)
    assert steps_to_end(fall - 1) == (fall - 1, 1.0)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("CartPole-v1", 60),
        ("MountainCar-v0", 400),
        ("FrozenLake-v1", 60),
        ("FrozenLake8x8-v1", 100),
        ("Taxi-v3", 900),
        ("LunarLander-v2", 150),
        ("Hopper-v4", 60),
        ("Walker2d-v4", 60),
        ("Ant-v4", 200),
        ("Humanoid-v4", 60),
        ("InvertedPendulum-v4", 30),
        ("InvertedDoublePendulum-v4", 30),
    ],
)
def test_natural_ends_are_those_that_envpool_tells_where_no_limit_is_near(name, steps):
    number, rng = 16, np.random.default_rng(0)
    with SyncEnv(name, number, "cpp", options={"max_episode_steps": 100_000}) as env:
        ended = natural_end(name, env._backend._pool.config)
        spec, timestep, found = env.spec.action, env.reset(), 0
        for _ in range(steps):
            if spec.dtype.kind == "i":
                action = rng.integers(0, spec.maximum + 1, number).astype(spec.dtype)
            else:
                shape = (number, *spec.shape)
                action = rng.uniform(spec.minimum, spec.maximum, shape).astype(spec.dtype)
            if name == "MountainCar-v0":  # swings up the hill
                action = np.where(timestep.observation[:, 1] >= 0, 2, 0).astype(spec.dtype)
            timestep = env.step(action)
            last = timestep.step_type == LAST
            np.testing.assert_array_equal(ended(timestep.observation, timestep.reward), last)
            found += last.sum()
    assert found


def test_robots_whose_observations_do_not_tell_their_end_have_none():
    told = {"terminate_when_unhealthy": True, "exclude_current_positions_from_observation": True}
    assert natural_end("Hopper-v4", told | {"healthy_z_min": 0.7}) is not None
    assert natural_end("Hopper-v4", told | {"terminate_when_unhealthy": False}) is None
    assert natural_end("Ant-v4", told | {"frame_stack": 3}) is None
    assert natural_end("HalfCheetah-v4", told) is None
