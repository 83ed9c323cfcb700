"""Policy sets in games of turns and in games in JAX."""

import dataclasses

import pytest

from agents.fixed import RandomConfig
from agents.ppo import PPOConfig
from programs.experiment import EnvConfig
from programs.member_config import MemberConfig
from programs.policy_sets.members import divide
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.optimizers import OptimizerConfig
from tests.programs import running
from tests.programs.policies.seats import games
from tests.programs.policy_sets import cases

pytestmark = pytest.mark.timeout(120)


def test_a_policy_learns_a_game_of_turns_against_another_one(tmp_path):
    """Who takes two of five stones can win whatever the other seat does."""
    env = EnvConfig(f"{games.HERE}:TakeStones", num_envs=16)
    policies = {
        "learner": MemberConfig(seats=("first",)),
        "other": MemberConfig(agent=RandomConfig()),
    }
    agent = PPOConfig(
        num_epochs=4, num_minibatches=1, discount=1.0, optimizer=OptimizerConfig(learning_rate=0.01)
    )
    experiment = cases.small(env, policies, 8, agent=agent, frames=4_000)
    evaluation = EvaluatorConfig(episodes=40, num_envs=8)
    result = running.run(dataclasses.replace(experiment, evaluator=evaluation), tmp_path / "run")
    assert result.eval_return_mean == 1.0
    assert result.policies["learner"]["env_frames"] >= 4_000


def test_policies_share_a_game_in_jax(tmp_path):
    env = EnvConfig("rlstack.jax_envs.cover:Cover", num_envs=6, type="jax", options={"length": 5})
    policies = {
        "pair": MemberConfig(seats=("agent_0", "agent_2")),
        "other": MemberConfig(agent=RandomConfig()),
    }
    experiment = cases.small(env, policies, 4, frames=64)
    division = divide(experiment)
    assert division.seat_names == ("agent_0", "agent_1", "agent_2")
    assert division.members["other"].rows(6, 3) == [1, 4]
    result = running.run(experiment, tmp_path / "run")
    assert result.policies["pair"]["env_frames"] >= 64 and result.eval_return_mean < 0
