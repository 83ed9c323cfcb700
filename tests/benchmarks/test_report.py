"""The measurements of benchmarks, and a check that the PPO reference does the same work."""

import json
import time

import jax
import numpy as np
import pytest

from benchmarks import report, single_process
from benchmarks.reference_ppo import Minibatch, ReferencePPO, gae
from rlstack.agents.ppo import PPOConfig
from rlstack.families.epochs import EpochRows
from rlstack.families.policy_gradient import PolicyGradientOutput
from rlstack.math import returns
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import EnvConfig
from rlstack.types import TimeStep


def test_measurements_alternate_and_neighbours_are_paired():
    calls, numbers = [], iter(range(1, 9))

    def side(name):
        def measured():
            calls.append(name)
            return float(next(numbers))

        return measured

    comparison = report.alternate(side("ours"), side("reference"), 3)
    assert calls == ["ours", "reference", "reference", "ours", "ours", "reference"]
    assert comparison == report.Comparison((1, 4, 5), (2, 3, 6))
    assert comparison.ratios == [1 / 2, 4 / 3, 5 / 6]
    assert comparison.ratio == 5 / 6
    assert comparison.medians == {"ours": 4, "reference": 3}
    assert comparison.spread == (1 / 2, 4 / 3)


def test_the_ratio_is_robust_against_an_outlier_and_a_drifting_machine():
    speeds = [100.0, 80.0, 60.0, 50.0, 1.0]
    comparison = report.Comparison((*(0.9 * speed for speed in speeds[:-1]), 90.0), tuple(speeds))
    assert comparison.ratio == pytest.approx(0.9)
    assert comparison.spread == pytest.approx((0.9, 0.9))


def test_repeats_must_be_at_least_1():
    with pytest.raises(ValueError, match="alternate: repeats must be at least 1; got 0"):
        report.alternate(lambda: 1.0, lambda: 1.0, 0)


def test_rate_counts_steps_per_second():
    assert 500 < report.rate(20, lambda: time.sleep(0.02)) < 1000


class _Sleeper:
    def nap(self, seconds):
        time.sleep(seconds)
        return seconds


def test_timers_measure_shares_and_restore_the_methods():
    sleeper, timers = _Sleeper(), report.Timers()
    sleeper.own = sleeper.nap
    before = dict(vars(sleeper))
    with timers.on(
        report.Timed(sleeper, "nap", "asleep"),
        report.Timed(sleeper, "own", "asleep", wait=lambda seconds: time.sleep(seconds)),
    ):
        assert sleeper.nap(0.02) == 0.02
        assert sleeper.own(seconds=0.015) == 0.015  # then `wait` sleeps equally long
    assert vars(sleeper) == before
    sleeper.nap(0.01)  # no longer timed
    shares = timers.shares(0.1)
    assert list(shares) == ["asleep", "rest"]
    assert 0.5 <= shares["asleep"] < 0.9
    assert sum(shares.values()) == pytest.approx(1)


def test_a_result_is_one_json_line_and_a_table_that_marks_slow_settings():
    result = report.Result.empty("name")
    result.add("fast", report.Comparison((9.0,), (10.0,)), {"ours": {"env": 0.25, "rest": 0.75}})
    child = report.Result.empty("name")
    child.add("slow", report.Comparison((5.0,), (10.0,)), {})
    result.update(json.loads(child.line()))
    assert "\n" not in result.line()
    assert json.loads(result.line()) == {
        "name": "name",
        "ratios": {"fast": 0.9, "slow": 0.5},
        "medians": {
            "fast": {"ours": 9.0, "reference": 10.0},
            "slow": {"ours": 5.0, "reference": 10.0},
        },
        "spread": {"fast": [0.9, 0.9], "slow": [0.5, 0.5]},
        "where": {"fast": {"ours": {"env": 0.25, "rest": 0.75}}, "slow": {}},
    }
    _, fast, where, slow = result.table(0.85).splitlines()
    assert "under" not in fast and slow.endswith("under 0.85")
    assert where.strip() == "ours: env 25%, rest 75%"


def test_numbers_that_json_cannot_represent_are_refused():
    result = report.Result.empty("name")
    result.add("x", report.Comparison((float("nan"),), (1.0,)), {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        result.line()


def test_the_reference_estimates_advantages_as_rlstack_does():
    rng = np.random.default_rng(0)
    shape = (50, 7)
    rewards = rng.normal(size=shape).astype(np.float32)
    values = rng.normal(size=(51, 7)).astype(np.float32)
    discounts = (0.99 * (rng.random(shape) > 0.1)).astype(np.float32)
    mask = rng.random(shape) > 0.1
    ours = returns.gae(rewards, discounts, values, 0.95, mask)
    advantages, targets = gae(rewards, discounts, values, 0.95, mask)
    np.testing.assert_allclose(advantages, ours.advantages, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(targets, ours.targets, rtol=1e-5, atol=1e-5)


@pytest.fixture
def reference():
    pytest.importorskip("envpool")
    made = []

    def make(env, **hyperparameters):
        cfg = PPOConfig(num_epochs=2, num_minibatches=2, **hyperparameters)
        made.append(ReferencePPO(cfg, EnvConfig(env, 4), NetworkConfig(), 40))
        return made[-1]

    yield make
    for program in made:
        program.close()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.timeout(60)
def test_both_sides_of_the_comparison_minimise_the_same_loss(reference, env):
    program = reference(env)
    program.rollout()
    num_rows = 40 * 4
    rng = np.random.default_rng(0)
    advantage, target = rng.normal(size=(2, num_rows)).astype(np.float32)
    mask = rng.random(num_rows) > 0.2
    observation, action, log_prob = (
        x.reshape((num_rows, *x.shape[2:]))
        for x in (program.observations[:-1], program.actions, program.log_probs)
    )
    log_prob = log_prob + 0.3 * rng.normal(size=num_rows).astype(np.float32)  # some ratios clip

    experiment = single_process.experiment(single_process.Setting("ppo", env, 4, 1, 1))
    with make_env(experiment.env, 1) as pool:
        agent = make_agent(experiment, pool.spec)
    zeros = np.zeros(num_rows, np.float32)
    timestep = TimeStep(zeros.astype(np.int32), zeros, zeros, observation)
    output = PolicyGradientOutput(action, log_prob, zeros)
    rows = EpochRows(timestep, output, advantage, target, mask, ())
    ours = jax.value_and_grad(lambda net: agent.loss(net, rows)[0])(program.params)
    minibatch = Minibatch(observation, action, log_prob, advantage, target, mask)
    theirs = jax.value_and_grad(program.loss)(program.params, minibatch)
    assert len(jax.tree.leaves(ours)) > 10
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_the_reference_refuses_options_that_it_would_ignore(reference):
    for ignored in (
        {"value_clip": 0.2},
        {"optimizer": OptimizerConfig(anneal_steps=10)},
        {"max_grad_norm": 0.0},
    ):
        with pytest.raises(ValueError, match="ReferencePPO: the optimizer must be one Adam"):
            reference("CartPole-v1", **ignored)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_reference_learns_cartpole():
    pytest.importorskip("envpool")
    cfg = PPOConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    program = ReferencePPO(cfg, EnvConfig("CartPole-v1", 8), NetworkConfig(), 128)
    try:
        program.train(200)  # 204,800 steps
        assert np.mean(program.episode_returns[:50]) < 60
        assert np.mean(program.episode_returns[-50:]) > 400
    finally:
        program.close()
