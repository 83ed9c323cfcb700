"""Environments that start episodes by number: `reset_with_index` on every pool, and without it."""

import dataclasses

import gymnasium
import numpy as np
import pytest

from rlstack.checks import EnvError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.entity import as_dm_env
from rlstack.entity.games.count import Count
from rlstack.envs import SyncEnv
from rlstack.programs.build.environments import make_env, make_evaluation_env
from rlstack.programs.build.evaluation import evaluate, make_evaluator
from tests.programs.hooks.numbered import Numbered, NumberedDm
from tests.programs.running import ppo

pytestmark = [pytest.mark.timeout(60)]


class Wrapped(gymnasium.Wrapper):
    """Passes on every attribute, as the wrappers of older Gymnasium do."""

    def __init__(self):
        super().__init__(Numbered())

    def __getattr__(self, name):
        return getattr(self.env, name)


class CountByIndex(Count):
    def reset_with_index(self, index):
        return dataclasses.replace(self.reset(), metrics={"index": index})


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
@pytest.mark.parametrize("env", [Numbered, NumberedDm])
def test_the_first_episodes_have_numbers(env, kind):
    name = f"{env.__module__}:{env.__name__}"
    with SyncEnv(name, 3, kind, num_workers=2, first_index=4) as pool:
        assert pool.reset().observation[:, 0].tolist() == [4, 5, 6]
        assert pool.reset().observation[:, 0].tolist() == [-1] * 3
    with SyncEnv(name, 2, kind) as pool:
        assert pool.reset().observation[:, 0].tolist() == [-1] * 2


def test_a_wrapper_is_not_passed_by():
    with SyncEnv(Wrapped, 2, "for_loop", first_index=0) as pool:
        assert pool.reset().observation[:, 0].tolist() == [-1] * 2


def test_a_game_may_start_by_number():
    env = as_dm_env(CountByIndex())
    env.reset_with_index(7)
    assert env.last_metrics == {"index": 7}
    assert as_dm_env(Count()).reset_with_index(7).first()


def test_what_it_returns_is_checked():
    class Wrong(Numbered):
        def reset_with_index(self, index):
            return np.zeros(1, np.float32)

    with (
        SyncEnv(Wrong, 1, "for_loop", first_index=0) as pool,
        pytest.raises(EnvError, match=r"must return \(observation, info\)"),
    ):
        pool.reset()


@pytest.mark.parametrize("num_envs", [2, 3])
def test_an_evaluation_by_index_plays_these_episodes(num_envs):
    cfg = EvaluatorConfig(episodes=6, num_envs=num_envs, by_index=True)
    experiment = ppo("single_process", env={"name": f"{Numbered.__module__}:Numbered"})
    experiment = dataclasses.replace(experiment, evaluator=cfg)
    with make_evaluation_env(experiment) as env:
        evaluator = make_evaluator(experiment, env.spec)
    found = evaluate(experiment, evaluator, evaluator.agent.initial_params(np.zeros(2, np.uint32)))
    assert found.returns.tolist() == [1, 2, 3, 4, 5, 6]
    with make_env(experiment.env, seed=1) as env:  # training starts as always
        assert set(env.reset().observation[:, 0].tolist()) == {-1}
