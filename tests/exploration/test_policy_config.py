"""Policies by config: each kind and schedule makes what `rlstack.exploration` makes in Python."""

import dataclasses

import jax
import numpy as np
import pytest

from rlstack import distributions, exploration
from rlstack.checks import WrongKindError
from rlstack.exploration import Counts, PolicyConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.presets import preset


def values(config, steps, num_envs=4):
    made = exploration.make_policy(config, num_envs)
    counts = Counts(np.array(steps), np.array(steps), np.arange(len(steps)))
    return made.temperature(counts)


def test_schedules_count_the_steps_of_all_environments_or_the_episodes_of_each():
    linear = PolicyConfig("softmax", "linear", start=1.0, end=0.5, steps=100)
    np.testing.assert_allclose(values(linear, [0, 10, 25, 90]), [1.0, 0.8, 0.5, 0.5])
    halving = PolicyConfig("softmax", "exponential", 1.0, 0.0, half_life=10, over="episodes")
    np.testing.assert_allclose(values(halving, [0, 10, 20]), [1.0, 0.5, 0.25])
    phases = PolicyConfig("softmax", "multi_phase", points=((0, 1.0), (40, 0.2), (80, 0.1)))
    np.testing.assert_allclose(values(phases, [0, 10, 15, 50]), [1.0, 0.2, 0.15, 0.1], rtol=1e-6)


def test_each_kind_makes_its_policy():
    assert exploration.make_policy(PolicyConfig("sample"), 2) == exploration.Sample()
    assert exploration.make_policy(
        PolicyConfig("epsilon_greedy", start=0.1), 2
    ) == exploration.EpsilonGreedy(0.1)
    assert exploration.make_policy(
        PolicyConfig("gaussian_noise", start=0.2), 2
    ) == exploration.GaussianNoise(0.2)
    assert exploration.make_policy(
        PolicyConfig("uniform_noise", start=0.2), 2
    ) == exploration.UniformNoise(0.2)
    warm = exploration.make_policy(PolicyConfig("softmax", start=2.0, warm_up=30), 2)
    assert warm == exploration.WarmUp(exploration.Softmax(2.0), 30, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "epsilon_greedy", "start": 2.0}, "epsilon must be in"),
        ({"kind": "epsilon_greedy", "schedule": "linear", "end": -0.2}, "epsilon must be in"),
        ({"kind": "softmax", "schedule": "linear", "end": 0.0}, "temperature must be positive"),
        ({"kind": "softmax", "schedule": "exponential", "end": -1.0}, "temperature must be"),
        (
            {"kind": "uniform_noise", "schedule": "multi_phase", "points": ((0, 1.0), (9, -1.0))},
            "scale must be at least 0",
        ),
        ({"kind": "sample", "schedule": "linear"}, "schedule must be constant for sample"),
        ({"kind": "softmax", "schedule": "multi_phase"}, "points must be one or more"),
        ({"warm_up": 5}, "warm_up must be 0 for agent"),
    ],
)
def test_settings_that_make_no_policy_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**changes)


def test_an_experiment_uses_it_and_schedules_need_an_agent_that_counts():
    experiment = preset("cartpole-dqn")
    with make_env(dataclasses.replace(experiment.env, num_envs=1, wait_num=0), 0) as env:
        spec = env.spec
    chosen = PolicyConfig("softmax", "linear")
    made = make_agent(dataclasses.replace(experiment, policy=chosen), spec)
    assert made.policy == exploration.make_policy(chosen, experiment.total_envs)
    other = dataclasses.replace(preset("cartpole-random"), policy=chosen)
    with pytest.raises(ValueError, match="whose state does not count steps"):
        make_agent(other, spec)
    assert make_agent(other, spec, greedy=True).policy == exploration.Greedy()


def test_a_loss_that_compares_with_acting_takes_the_agents_own_probabilities():
    for name in ("cartpole-ppo", "cartpole-impala", "cartpole-a2c", "cartpole-reinforce"):
        for policy in (PolicyConfig("softmax", start=3.0), PolicyConfig("sample", warm_up=10)):
            with pytest.raises(ValueError, match=r"policy\.kind must be agent, or sample"):
                dataclasses.replace(preset(name), policy=policy)
        dataclasses.replace(preset(name), policy=PolicyConfig("sample"))


def test_a_warm_up_takes_one_array():
    zeros = np.zeros((2, 3), np.float32)
    joint = distributions.Joint({"a": distributions.categorical(zeros)})
    warm = exploration.WarmUp(exploration.Sample(), 10)
    counts = Counts(np.zeros(2), np.zeros(2), np.arange(2))
    with pytest.raises(WrongKindError, match="the action must be one array; got dict"):
        warm(jax.random.PRNGKey(0), joint, counts)


def test_an_agent_that_learns_from_data_only_takes_no_policy():
    with pytest.raises(ValueError, match="policy must keep its defaults with BC"):
        dataclasses.replace(preset("cartpole-bc"), policy=PolicyConfig("softmax"))
