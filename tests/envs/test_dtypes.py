"""Observations and actions of 64 bits become those of 32 bits, in every Python pool."""

from __future__ import annotations

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv

SYNC = ("for_loop", "thread", "process")
pytestmark = pytest.mark.timeout(60)


class Wide(gymnasium.Env):
    """Shows the step's number in every kind of space of 64 bits, times ``scale``."""

    def __init__(self, scale: int = 1):
        self.observation_space = spaces.Dict(
            {
                "one": spaces.Discrete(9),
                "many": spaces.MultiDiscrete([9, 9]),
                "signed": spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
                "unsigned": spaces.Box(0, 2**64 - 1, (1,), np.uint64),
                "real": spaces.Box(-np.inf, np.inf, (1,), np.float64),
                "small": spaces.Box(0, 255, (2,), np.uint8),
            }
        )
        self.action_space = spaces.Box(-(2**40), 2**40, (1,), np.int64)
        self._scale, self._time = scale, 0

    def reset(self, *, seed=None, options=None):
        self._time = 0
        return self._observation(), {}

    def step(self, action):
        assert action.dtype == np.int64
        self._time += 1
        return self._observation(), 0.0, self._time == 5, False, {}

    def _observation(self):
        n = self._time
        return {
            "one": np.int64(n),
            "many": np.array([n, n + 1]),
            "signed": np.array([n * self._scale, 0]),
            "unsigned": np.array([n], np.uint64),
            "real": np.array([n / 2]),
            "small": np.array([n, 0], np.uint8),
        }


class WideDm(dm_env.Environment):
    """As a dm_env: a discrete observation and a bounded action of 64 bits."""

    def observation_spec(self):
        return specs.DiscreteArray(5, np.int64)

    def action_spec(self):
        return specs.BoundedArray((1,), np.int64, -(2**40), 2**40)

    def reset(self):
        return dm_env.restart(np.int64(0))

    def step(self, action):
        assert action.dtype == np.int64
        return dm_env.transition(1.0, 4)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", SYNC)
def test_observations_have_the_dtypes_of_jax(kind):
    with SyncEnv(Wide, 2, kind) as env:
        first, second = env.reset().observation, env.step(np.zeros((2, 1), int)).observation
        wanted = {
            "one": np.int32, "many": np.int32, "signed": np.int32, "unsigned": np.uint32,
            "real": np.float32, "small": np.uint8,
        }  # fmt: skip
        for observation in (env.spec.observation, first, second):
            assert {name: leaf.dtype for name, leaf in observation.items()} == wanted
        assert env.spec.action.dtype == np.int32
    assert second["one"].tolist() == [1, 1]
    assert second["many"].tolist() == [[1, 2]] * 2
    assert second["real"].tolist() == [[0.5]] * 2
    with SyncEnv(WideDm, 2, kind) as env:
        assert isinstance(env.spec.observation, specs.DiscreteArray)
        assert env.reset().observation.dtype == env.spec.action.dtype == np.int32
        assert env.step(np.zeros((2, 1), int)).observation.tolist() == [4, 4]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_asynchronous_pools_have_them_too(kind):
    with AsyncEnv(Wide, 3, 2, kind) as env:
        env.async_reset()
        assert env.recv()[1].observation["many"].dtype == np.int32


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", SYNC)
@pytest.mark.parametrize("scale", [2**31, -(2**32)])
def test_a_number_that_does_not_fit_is_an_error_and_does_not_wrap(kind, scale):
    with SyncEnv(Wide, 2, kind, options={"scale": scale}) as env:
        env.reset()
        with pytest.raises(
            EnvError,
            match=rf"Env [01] \(Wide\): observation\['signed'\] must fit int32.*got {scale}",
        ):
            env.step(np.zeros((2, 1), int))


def test_a_discrete_space_that_is_too_large_is_an_error():
    class Huge(Wide):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Discrete(2**40)

    with pytest.raises(EnvError, match=r"Env 0 \(Huge\): observation_space: .* at most 2\*\*31"):
        SyncEnv(Huge, 1)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4"])
def test_toy_text_of_gymnasium_steps(name):
    with SyncEnv(name, 2, "for_loop") as env:
        env.reset()
        leaves = env.step(np.zeros(2, int)).observation
        leaves = leaves if isinstance(leaves, tuple) else (leaves,)
        assert all(leaf.dtype in (np.int32, np.int8) for leaf in leaves)
