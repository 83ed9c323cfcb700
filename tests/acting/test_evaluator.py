"""The Evaluator on scripted episodes."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from rlstack.acting.evaluator import Evaluator, as_logs
from rlstack.configs.acting import EvaluatorConfig
from rlstack.types import TimeStep
from tests.agent_cases import FIRST, LAST, MID, CountingAgent


class ScriptedEnv:
    """Environment i repeats episodes of ``lengths[i]`` steps; a step's reward is its action."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.num_envs = len(lengths)
        self.resets = 0

    def reset(self):
        self.resets += 1
        self.at = np.zeros(len(self.lengths), int)
        return self._show(np.zeros(len(self.lengths)))

    def step(self, actions):
        begins = self.at == self.lengths
        self.at = np.where(begins, 0, self.at + 1)
        return self._show(np.where(begins, 0, actions))

    def _show(self, reward):
        kind = np.where(self.at == 0, FIRST, np.where(self.at == self.lengths, LAST, MID))
        ones = np.ones(len(self.lengths), np.float32)
        return TimeStep(kind.astype(np.int32), reward.astype(np.float32), ones, ones)


class Ramped(NamedTuple):
    """The smallest output of an agent."""

    action: Any


class Ramp(CountingAgent):
    """Acts with params times the steps counted in the episode: 1, 2, 3, ..."""

    def actor_step(self, rng_key, params, timestep, state):
        _, state = super().actor_step(rng_key, params, timestep, state)
        return Ramped(params * state["count"]), state


def evaluator(lengths, episodes, **changes):
    env = ScriptedEnv(lengths)
    cfg = EvaluatorConfig(episodes=episodes, num_envs=len(lengths), **changes)
    return Evaluator(cfg, Ramp(), jax.random.PRNGKey(0)), env


def test_every_environment_plays_as_many_episodes_however_short():
    judge, env = evaluator([2, 7, 1], episodes=6)
    found = judge.evaluate(1.0, env)
    assert found.lengths.tolist() == [2, 2, 7, 7, 1, 1]
    # 1 + 2 + ... + length in each episode, because the state is reset.
    assert found.returns.tolist() == [3, 3, 28, 28, 1, 1]


def test_each_evaluation_starts_afresh_with_the_params_it_is_given():
    judge, env = evaluator([3, 2], episodes=2)
    assert judge.evaluate(1.0, env).returns.tolist() == [6, 3]
    assert judge.evaluate(10.0, env).returns.tolist() == [60, 30]
    assert judge.evaluate(1.0, env).returns.tolist() == [6, 3]
    assert env.resets == 3


@pytest.mark.timeout(60)
def test_an_endless_episode_is_cut_and_counts_with_its_return_so_far(caplog):
    endless = 10**9
    judge, env = evaluator([2, endless, 5], episodes=6, max_steps=4)
    seen = []
    found = judge.evaluate(1.0, env, lambda *progress: seen.append(progress))
    assert found.lengths.tolist() == [2, 2, 4, 4, 4, 4]
    assert found.returns.tolist() == [3, 3, 10, 10, 10, 10]
    assert found.cut == 4
    assert as_logs(found)["evaluator/cut_episodes"] == 4
    assert env.resets == 2  # only a reset ends an endless episode
    assert seen[0] == (0, 6) and seen[-1] == (6, 6)
    assert "4 of 6 episodes were cut after evaluator.max_steps (4) steps" in caplog.text


def test_an_episode_as_long_as_the_limit_is_not_cut():
    judge, env = evaluator([4, 3], episodes=4, max_steps=4)
    found = judge.evaluate(1.0, env)
    assert found.lengths.tolist() == [4, 4, 3, 3]
    assert found.cut == 0 and "evaluator/cut_episodes" not in as_logs(found)
    assert env.resets == 1


@pytest.mark.timeout(60)
def test_a_seat_that_never_joins_its_games_is_cut():
    judge, env = evaluator([3, 0], episodes=4, max_steps=5)  # the second one is FIRST for ever
    found = judge.evaluate(1.0, env)
    assert found.lengths.tolist() == [3, 3, 0, 0] and found.cut == 2
    assert found.returns.tolist() == [6, 6, 0, 0]


def test_a_pool_of_another_size_is_refused():
    judge, _ = evaluator([3, 2], episodes=2)
    with pytest.raises(ValueError, match=r"num_envs \(2\) environments; got 3"):
        judge.evaluate(1.0, ScriptedEnv([1, 1, 1]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"episodes": 7, "num_envs": 2}, "multiple of num_envs"),
        ({"episodes": 0}, "at least 1"),
        ({"period": -1}, "period must be at least 0"),
    ],
)
def test_configs_that_would_be_unfair_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        EvaluatorConfig(**config)
