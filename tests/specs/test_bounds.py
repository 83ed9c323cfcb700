"""Bounds that stand for none are infinite in every adapter, and refused where bounds are needed."""

import dataclasses

import dm_env
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from rlstack import distributions
from rlstack.agents.fixed import Random, RandomConfig
from rlstack.envs import SyncEnv
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.networks.base import dummy_timestep
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.presets import preset
from rlstack.specs import has_finite_bounds, with_open_bounds
from rlstack.types import EnvSpec
from tests.jax_envs.toy import PointMass

MOST = 3.4028234663852886e38  # float32's largest number


def box(low, high, dtype=np.float32):
    return specs.BoundedArray((2,), dtype, low, high)


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        (box(-MOST, MOST), None, None),
        (box(-np.inf, MOST), None, None),
        (box(-2e38, 3e38), None, None),
        (box(-np.inf, np.inf), None, None),
        (box([-MOST, -1], [MOST, 1]), [-np.inf, -1], [np.inf, 1]),
        (box(0, MOST), [0, 0], [np.inf, np.inf]),
        (box(-1e38, 1e38), [-1e38] * 2, [1e38] * 2),
        (box(-1e300, 1.7e308, np.float64), [-1e300] * 2, [np.inf] * 2),
        (box(-65504, 65504, np.float16), None, None),
        (box(-(2**31), 2**31 - 1, np.int32), [-(2**31)] * 2, [2**31 - 1] * 2),
        (box(0, 255, np.uint8), [0, 0], [255, 255]),
    ],
)
def test_huge_bounds_are_none(spec, low, high):
    opened = with_open_bounds(spec)
    assert opened.dtype == spec.dtype and opened.shape == (2,)
    if low is None:
        assert not isinstance(opened, specs.BoundedArray)
    else:
        np.testing.assert_array_equal(np.broadcast_to(opened.minimum, 2), np.array(low, spec.dtype))
        np.testing.assert_array_equal(
            np.broadcast_to(opened.maximum, 2), np.array(high, spec.dtype)
        )


def test_finite_bounds():
    assert has_finite_bounds(box(-1, 1)) and has_finite_bounds(box(-1e38, 1e38))
    for spec in (box(-MOST, MOST), box(-1, MOST), box(1, 1), specs.Array((2,), np.float32)):
        assert not has_finite_bounds(spec)


class Huge(gymnasium.Env):
    def __init__(self, dtype="float32", most=MOST):
        self.observation_space = spaces.Box(-most, most, (2,), dtype)
        self.action_space = spaces.Box(-most, most, (2,), dtype)


class HugeDm(dm_env.Environment):
    def observation_spec(self):
        return box(-MOST, MOST)

    action_spec = observation_spec

    def reset(self):
        return dm_env.restart(np.zeros(2, np.float32))

    def step(self, action):
        return dm_env.transition(0.0, np.zeros(2, np.float32))


class HugeJax(PointMass):
    def action_spec(self):
        return box(-MOST, MOST)


@pytest.mark.parametrize(
    ("builder", "options"),
    [(Huge, {}), (Huge, {"dtype": "float64", "most": np.finfo(np.float64).max}), (HugeDm, {})],
)
def test_every_adapter_has_one_idea_of_no_bound(builder, options):
    with SyncEnv(builder, 1, "for_loop", options=options) as env:
        for spec in env.spec[:2]:  # the observation and the action
            assert not isinstance(spec, specs.BoundedArray) and spec.dtype == np.float32


def test_environments_in_jax_have_it_too():
    env = BatchedEnv(HugeJax())
    assert not isinstance(env.spec.action, specs.BoundedArray)


@pytest.mark.parametrize("name", ["pendulum-sac", "pendulum-td3", "pendulum-ddpg"])
@pytest.mark.parametrize("most", [MOST, np.inf])
def test_agents_that_need_bounds_refuse_and_name_environment_and_way_out(name, most):
    experiment = preset(name)
    experiment = dataclasses.replace(
        experiment, env=dataclasses.replace(experiment.env, name="package:Crane")
    )
    message = r"^Environment package:Crane: .* finite bounds; got .*in a wrapper of it, or use ppo"
    with pytest.raises(ValueError, match=message):
        make_agent(experiment, EnvSpec(box(-1, 1), box(-most, most)))


def test_squashed_distributions_and_random_actions_do_not_take_huge_bounds():
    with pytest.raises(ValueError, match="squash needs finite bounds"):
        distributions.from_parameters(box(-MOST, MOST), jnp.zeros((3, 4)), squash=True)
    agent = Random(RandomConfig(), box(-1, 1), box(-MOST, MOST), lambda *_: None, lambda: None)
    step = dummy_timestep(box(-1, 1))
    output, _ = agent.actor_step(jax.random.PRNGKey(0), (), step, ())
    assert np.abs(output.action).max() < 10  # of a standard normal
