"""Rewards and observations that are not finite are errors that name environment and leaf."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.cpp.backend import CppBackend

pytestmark = pytest.mark.timeout(60)


class Poisoned(gymnasium.Env):
    """Environment 1 shows ``value`` in a part of its observation, or as reward, at step 2."""

    def __init__(self, value: float, where: str = "camera", seed: int = 0):
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
                "count": spaces.Discrete(5),
            }
        )
        self.action_space = spaces.Discrete(2)
        self._value, self._where, self._bad = value, where, seed == 1

    def reset(self, *, seed=None, options=None):
        self._time = 0
        return self._observation(), {}

    def step(self, action):
        self._time += 1
        bad = self._bad and self._time == 2 and self._where == "reward"
        # A float64 that becomes infinite as float32 is not found by a check of the float64.
        return self._observation(), 1e300 if bad else 1.0, False, False, {}

    def _observation(self):
        camera = np.full((2, 3), 3e38, np.float32)  # its square is infinite
        if self._bad and self._time == 2 and self._where == "camera":
            camera[0, 2] = self._value
        return {"camera": camera, "count": self._time % 5}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, value) for kind in ("for_loop", "thread") for value in (np.nan, np.inf, -np.inf)),
        ("process", np.nan),
        pytest.param("process", np.inf, marks=pytest.mark.slow),
        pytest.param("process", -np.inf, marks=pytest.mark.slow),
    ],
)
def test_the_error_names_environment_and_leaf(kind, value):
    options = {"value": value}
    with SyncEnv(Poisoned, 3, kind, options=options) as env:
        env.reset()
        env.step(np.zeros(3, int))
        with pytest.raises(
            EnvError,
            match=rf"Env 1 \(Poisoned\): observation\['camera'\] must be finite; got {value} at "
            r"index \(0, 2\)",
        ):
            env.step(np.zeros(3, int))
    with SyncEnv(Poisoned, 3, kind, options=options, check_finite=False) as env:
        env.reset()
        env.step(np.zeros(3, int))
        found = env.step(np.zeros(3, int)).observation["camera"]
    np.testing.assert_array_equal(found[1, 0, 2], np.float32(value))


def test_a_reward_that_does_not_fit_is_an_error():
    options = {"value": 0.0, "where": "reward"}
    with SyncEnv(Poisoned, 2, "for_loop", options=options) as env:
        env.reset()
        env.step(np.zeros(2, int))
        with pytest.warns(RuntimeWarning), pytest.raises(EnvError, match=r"Env 1.*the reward must"):
            env.step(np.zeros(2, int))


class Rewarding(gymnasium.Env):
    """Every reward is the same."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2)

    def __init__(self, reward: str):
        self._reward = float(reward)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), self._reward, False, False, {}


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_is_allowed_where_observations_are(kind, reward):
    if kind == "process" and reward != "nan":
        pytest.skip("one start of processes is enough")
    made = {"options": {"reward": reward}, "num_workers": 1}
    with SyncEnv(Rewarding, 1, kind, check_finite=False, **made) as env:
        env.reset()
        np.testing.assert_array_equal(env.step(np.zeros(1, int)).reward, [np.float32(reward)])
    with SyncEnv(Rewarding, 1, kind, **made) as env:
        env.reset()
        text = rf"Env 0 \(Rewarding\): the reward must be finite; got {reward}\. .*check-finite"
        with pytest.raises(EnvError, match=text):
            env.step(np.zeros(1, int))


def test_an_asynchronous_pool_names_the_environment_too():
    with AsyncEnv(Poisoned, 3, 2, "thread", options={"value": np.nan}) as env:
        env.async_reset()
        with pytest.raises(EnvError, match=r"Env 1 \(Poisoned\)"):
            while True:  # on a busy machine the other two may make many steps first
                ids, _ = env.recv()
                env.send(ids, np.zeros(2, int))


def test_environments_of_envpool_are_checked(monkeypatch):
    with SyncEnv("CartPole-v1", 3) as env:
        env.reset()
        received = CppBackend.recv

        def recv(self):
            ids, timestep = received(self)
            timestep.observation[2, 1] = np.nan
            return ids, timestep

        monkeypatch.setattr(CppBackend, "recv", recv)
        with pytest.raises(
            EnvError, match=r"Env 2 \(CartPole-v1\): observation must be finite; got nan .*\(1,\)"
        ):
            env.step(np.zeros(3, int))
