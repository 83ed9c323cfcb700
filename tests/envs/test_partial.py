"""Partially observed environments equal the full ones, except for the hidden values."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.envs.partial import cartpole_without_velocities
from rlstack.types import StepType

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
NAME = "rlstack.envs.partial:cartpole_without_velocities"
pytestmark = pytest.mark.timeout(60)


def balance(observation, velocities):
    """A controller that keeps the pole up, given what the environment hides."""
    x, angle = observation
    x_dot, angle_dot = velocities
    return int(angle + 0.3 * angle_dot + 0.03 * x + 0.06 * x_dot > 0)


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("skilled", [True, False])
def test_it_is_gymnasiums_cartpole(seed, skilled):
    """Compares starts, states, rewards and ends over several episodes."""
    whole, part = gymnasium.make("CartPole-v1"), cartpole_without_velocities()
    rng = np.random.default_rng(seed)
    seen, _ = whole.reset(seed=seed)
    shown, _ = part.reset(seed=seed)
    ends = []
    for _ in range(1200):
        # Rounding differs in the last of 16 digits; the difference stays below the tolerance.
        np.testing.assert_allclose(shown, seen[[0, 2]], rtol=0, atol=1e-6)
        assert shown.dtype == np.float32 and part.observation_space.contains(shown)
        action = balance(shown, seen[[1, 3]]) if skilled else int(rng.integers(2))
        seen, *expected, _ = whole.step(action)
        shown, *came, info = part.step(action)
        assert came == expected and info == {}
        if expected[1] or expected[2]:
            ends.append(tuple(expected[1:]))
            (seen, _), (shown, _) = whole.reset(), part.reset()
    # The skilled controller ends only at the time limit; the random one lets the pole fall.
    assert ends == [(False, True)] * 2 if skilled else set(ends) == {(True, False)}


def test_a_pool_cuts_off_at_the_limit_and_ends_at_a_fall():
    with SyncEnv(NAME, 1, options={"length": 5}) as env:
        assert env.spec.observation.shape == (2,)
        assert env.spec.action.num_values == 2
        timestep, rows = env.reset(), []
        for t in range(6):
            rows.append(env.step(np.array([t % 2])))
    assert [int(r.step_type[0]) for r in rows] == [MID, MID, MID, MID, LAST, FIRST]
    assert [float(r.discount[0]) for r in rows] == [1.0] * 6
    assert timestep.step_type[0] == FIRST
    with SyncEnv(NAME, 1) as env:
        env.reset()
        rows = [env.step(np.array([1])) for _ in range(20)]
    last = next(r for r in rows if r.step_type[0] == LAST)
    assert last.discount[0] == 0.0 and last.reward[0] == 1.0


def test_a_fall_at_the_limit_is_a_termination():
    env = cartpole_without_velocities()
    env.reset(seed=3)
    steps = 1
    while not env.step(1)[2]:
        steps += 1
    with SyncEnv(NAME, 1, seed=3, options={"length": steps}) as pool:
        pool.reset()
        rows = [pool.step(np.array([1])) for _ in range(steps)]
    assert [bool(r.last()[0]) for r in rows] == [False] * (steps - 1) + [True]
    assert rows[-1].discount[0] == 0.0


def test_it_is_picklable_seeded_and_checks_its_option():
    builder = pickle.loads(pickle.dumps(cartpole_without_velocities))
    first = [SyncEnv(builder, 3, seed=s).reset().observation for s in (1, 1, 2)]
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0][1:], first[2][:-1])
    with pytest.raises(ValueError, match="length must be at least 1"):
        cartpole_without_velocities(length=0)
