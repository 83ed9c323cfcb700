"""Evaluations in environments written in JAX are those of any other pool, in fewer calls."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.acting.evaluator import Evaluator
from rlstack.checks import EnvError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.jax_envs.environment import Outcome
from rlstack.programs.build import evaluation
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.evaluation import CompiledEvaluator, evaluate, make_evaluator
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset

CUE = "tests.jax_envs.toy:MemoryCue"
CHAIN = "tests.jax_envs.toy:TruncatingChain"
POINT = "tests.jax_envs.toy:PointMass"
MASKED = "tests.jax_envs.toy:MaskedDict"
SEATS = "rlstack.jax_envs.cover:Cover"
DEEP_SEA = "rlstack.jax_envs.bsuite:DeepSea"


class Drifting:
    """Each reward is 0.1, or NaN at the sixth step. An episode has ten steps, or never ends.

    The time is a real number, or with ``limit`` an integer that its spec limits.
    """

    def __init__(self, fails=False, ends=True, limit=0):
        self._fails, self._ends, self._limit = fails, ends, limit
        self._dtype = np.int32 if limit else np.float32

    def observation_spec(self):
        if self._limit:
            return specs.BoundedArray((1,), np.int32, 0, self._limit, "time")
        return specs.Array((1,), np.float32, "time")

    def action_spec(self):
        return specs.DiscreteArray(2, np.int32, "move")

    def reset(self, rng_key):
        return jnp.int32(0), jnp.zeros(1, self._dtype)

    def step(self, rng_key, state, action):
        state = state + 1
        reward = jnp.where(self._fails & (state == 6), jnp.nan, 0.1)
        return Outcome(
            state, state[None].astype(self._dtype), reward, self._ends & (state == 10), False
        )


def experiment(agent, name, options=None, rows=4, **changes):
    env = EnvConfig(name, rows, "jax", options=options or {})
    judge = EvaluatorConfig(episodes=3 * rows, num_envs=rows, **changes)
    return dataclasses.replace(preset(agent), env=env, evaluator=judge, seed=5)


def drifting(options, **changes):
    name = "tests.programs.build.test_compiled_evaluation:Drifting"
    return experiment("cartpole-dqn", name, options, **changes)


def made(cfg):
    """The evaluator of an experiment, one that steps a pool, and params."""
    compiled = make_evaluator(cfg, environment_spec(cfg))
    assert isinstance(compiled, CompiledEvaluator)
    stepping = Evaluator(cfg.evaluator, compiled.agent, compiled._fresh["rng_key"])
    params = jax.jit(compiled.agent.initial_params)(jax.random.PRNGKey(0))
    return compiled, stepping, params


def same(found, wanted):
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_allclose(found.returns, wanted.returns, rtol=1e-5)
    assert found.returns.dtype == wanted.returns.dtype == np.float64
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, values in found.metrics.items():
        np.testing.assert_allclose(values, wanted.metrics[name], rtol=1e-6)
    return found.cut == wanted.cut and found.opponents == wanted.opponents


@pytest.mark.parametrize(
    ("agent", "name", "options"),
    [
        ("memorycue-r2d2", CUE, {}),  # with a recurrent state
        ("cartpole-ppo", CHAIN, {}),  # with truncations
        ("pendulum-td3", POINT, {}),  # with actions that are clipped
        ("cartpole-dqn", MASKED, {}),  # with masks
        ("cartpole-ppo", SEATS, {"length": 5}),  # seats of games
        ("cartpole-ppo", DEEP_SEA, {}),  # with metrics of episodes
    ],
)
def test_episodes_are_those_of_an_evaluator_that_steps_a_pool(agent, name, options):
    cfg = experiment(agent, name, options, rows=6)
    compiled, stepping, params = made(cfg)
    found = evaluate(cfg, compiled, params)
    assert same(found, evaluate(cfg, stepping, params))
    assert same(evaluate(cfg, compiled, params), found)  # each starts afresh
    brief = evaluate(cfg, compiled, params, brief=True)
    assert same(brief, evaluate(cfg, stepping, params, brief=True))


def test_random_actions_are_those_of_an_evaluator_that_steps_a_pool():
    cfg = experiment("cartpole-dqn", MASKED, rows=6, epsilon=0.5)
    compiled, stepping, params = made(cfg)
    found = evaluate(cfg, compiled, params)
    assert same(found, evaluate(cfg, stepping, params))
    greedy, _, _ = made(experiment("cartpole-dqn", MASKED, rows=6))
    assert (evaluate(cfg, greedy, params).returns != found.returns).any()


def test_another_key_and_other_params_compile_nothing(compilations):
    cfg = experiment("cartpole-dqn", CHAIN)
    compiled, _, params = made(cfg)
    evaluation.compile_evaluation(cfg, compiled, jax.tree.map(np.zeros_like, params))
    with compilations() as names:
        evaluate(cfg, compiled, params)
        evaluate(cfg, compiled.with_key(jax.random.PRNGKey(1)), params)
    assert names == []


def test_the_steps_of_a_call_change_nothing(monkeypatch):
    cfg = drifting({})
    compiled, stepping, params = made(cfg)
    wanted = evaluate(cfg, stepping, params)
    np.testing.assert_allclose(wanted.returns, 1.0, rtol=1e-6)
    for seconds in (0.0, 100.0):
        monkeypatch.setattr(evaluation, "_CALL_SECONDS", seconds)
        assert same(evaluate(cfg, compiled, params), wanted)


def test_options_may_differ_from_pool_to_pool():
    short, longer = (experiment("cartpole-ppo", SEATS, {"length": n}, rows=3) for n in (5, 7))
    compiled, _, params = made(short)
    for cfg, length in (short, 5), (longer, 7), (short, 5):
        assert (evaluate(cfg, compiled, params).lengths == length).all()


@pytest.mark.timeout(60)
def test_endless_episodes_are_cut():
    cfg = drifting({"ends": False}, max_steps=7)
    compiled, stepping, params = made(cfg)
    found = evaluate(cfg, compiled, params)
    assert same(found, evaluate(cfg, stepping, params))
    assert found.cut == 12 and (found.lengths == 7).all()


def test_a_reward_that_is_not_finite_is_an_error_if_the_evaluation_gets_there():
    cfg = drifting({"fails": True})
    compiled, _, params = made(cfg)
    with pytest.raises(EnvError, match=r"Env 0, 1, 2, 3 \(tests\..*Drifting\): rewards and"):
        evaluate(cfg, compiled, params)
    short = drifting({"fails": True}, max_steps=5)
    compiled, _, params = made(short)
    np.testing.assert_allclose(evaluate(short, compiled, params).returns, 0.5, rtol=1e-6)


def test_an_integer_outside_of_its_space_is_an_error_too():
    cfg = drifting({"limit": 9})  # the last of the ten steps shows 10
    compiled, _, params = made(cfg)
    with pytest.raises(EnvError, match=r"Env 0, 1, 2, 3 \(.*Drifting\): integers in observations"):
        evaluate(cfg, compiled, params)
    fitting = drifting({"limit": 10})
    np.testing.assert_allclose(evaluate(fitting, made(fitting)[0], params).returns, 1.0, rtol=1e-6)


def test_an_evaluation_that_was_given_up_leaves_nothing_behind():
    cfg = drifting({})
    compiled, _, params = made(cfg)
    wanted, seen = evaluate(cfg, compiled, params), []

    def give_up(ended, total):
        seen.append(ended)
        if len(seen) == 15:
            raise KeyError

    with pytest.raises(KeyError):
        evaluate(cfg, compiled, params, give_up)
    assert seen == [0] * 10 + [4] * 5  # it is told of each step
    assert same(evaluate(cfg, compiled, params), wanted)
