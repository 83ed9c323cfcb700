"""Policy sets in games of turns, in JAX, of several matches, and of EnvPool."""

import dataclasses

import numpy as np
import pytest

from rlstack.agents.fixed import RandomConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.envs.cpp import library
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.build.policies.members import divide
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from tests.programs import running
from tests.programs.multi_policy import cases
from tests.programs.multi_policy.test_topologies import (
    LOCK_STEP,
    in_tables,
    learned,
    same_policies,
    versions_in,
)
from tests.programs.tools.seats import games

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")

COVER = EnvConfig("rlstack.jax_envs.cover:Cover", num_envs=6, type="jax", options={"length": 5})
ECHO = EnvConfig("tests.jax_envs.test_games:Echo", num_envs=8, type="jax")
MATCHES = EnvConfig(
    "rlstack.envs.seats.games:Matches",
    num_envs=16,
    options={"game": "rlstack.envs.seats.games:RockPaperScissors"},
)
_LATER = [pytest.mark.slow, pytest.mark.chosen]


@pytest.fixture(autouse=True)
def _nothing_left():
    with running.nothing_left():
        yield


@pytest.mark.slow
@pytest.mark.chosen
def test_a_policy_learns_a_game_of_turns_against_another_one(tmp_path):
    """Who takes two of five stones can win whatever the other seat does."""
    env = EnvConfig(f"{games.HERE}:TakeStones", num_envs=16)
    result = running.run(against_random(env, "first", 4_000), tmp_path / "run")
    assert result.eval_return_mean == 1.0
    assert result.policies["learner"]["env_frames"] >= 4_000


def against_random(env, seat, frames, **changes):
    """PPO in one of two seats against random actions."""
    policies = {"learner": MemberConfig(seats=(seat,)), "other": MemberConfig(agent=RandomConfig())}
    agent = PPOConfig(
        num_epochs=4, num_minibatches=1, discount=1.0, optimizer=OptimizerConfig(learning_rate=0.01)
    )
    rows = env.num_envs // 2
    experiment = cases.small(env, policies, rows, agent=agent, frames=frames, **changes)
    return dataclasses.replace(experiment, evaluator=EvaluatorConfig(episodes=40, num_envs=8))


@pytest.mark.slow
@pytest.mark.chosen
def test_policies_share_a_game_in_jax(tmp_path):
    policies = {
        "pair": MemberConfig(seats=("agent_0", "agent_2")),
        "other": MemberConfig(agent=RandomConfig()),
    }
    experiment = cases.small(COVER, policies, 4, frames=64)
    division = divide(experiment)
    assert division.seat_names == ("agent_0", "agent_1", "agent_2")
    assert division.members["other"].rows(6, 3) == [1, 4]
    result = running.run(experiment, tmp_path / "run")
    assert result.policies["pair"]["env_frames"] >= 64 and result.eval_return_mean < 0


def in_jax(env, topology, program=LOCK_STEP, **changes):
    """PPO in all seats but one, and DQN in that one."""
    seats = {COVER.name: ("agent_0", "agent_2"), ECHO.name: ("left",)}[env.name]
    policies = {
        "first": MemberConfig(seats=seats),
        "second": MemberConfig(agent=cases.DQN, replay=cases.DQN_REPLAY),
    }
    made = cases.small(env, policies, 4, **changes)
    return in_tables(running.small(made, topology, 300, program=program))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Results and params of a single process, by the name of its game in JAX."""
    found = {}
    for env in (COVER, ECHO):
        directory = tmp_path_factory.mktemp("single") / "run"
        found[env.name] = running.run(in_jax(env, "single_process"), directory), learned(directory)
    return found


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("env", "topology"),
    [
        pytest.param(COVER, "heavy_env", marks=_LATER),
        pytest.param(COVER, "light_env", marks=_LATER),
        pytest.param(COVER, "distributed", marks=_LATER),
        pytest.param(ECHO, "heavy_env", marks=_LATER),
        (ECHO, "light_env"),
        pytest.param(ECHO, "distributed", marks=_LATER),
    ],
    ids=lambda value: getattr(value, "name", value).rpartition(":")[2],
)
def test_a_set_in_a_game_in_jax_equals_a_single_process_bit_for_bit(
    tmp_path, single, env, topology
):
    expected, its_params = single[env.name]
    result = running.run(in_jax(env, topology), tmp_path / "run")
    assert result.policies == expected.policies
    assert min(policy["learner_steps"] for policy in result.policies.values()) >= 4
    assert same_policies(learned(tmp_path / "run"), its_params)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", running.TOPOLOGIES)
def test_forked_actors_share_games_in_jax(tmp_path, topology):
    program = {"launch": "processes", "num_actors": 2}
    result = running.run(in_jax(COVER, topology, program, checkpoint_period=100), tmp_path / "run")
    assert running.failures(tmp_path / "run") == []
    assert result.ended_by == "frames"
    assert all(policy["learner_steps"] > 0 for policy in result.policies.values())
    assert set(running.series(tmp_path / "run", "second/actor/episode_length")) == {5.0}


def league(topology, frames=200, **changes):
    """A policy against its past, and an exploiter that meets the newest version of it only."""
    policies = {
        "main": MemberConfig(seats=("first_0",)),
        "past": MemberConfig(
            seats=("second_0",), history=HistoryConfig(of="main", period=16, max_versions=3)
        ),
        "exploiter": MemberConfig(seats=("first_1",)),
        "newest": MemberConfig(
            seats=("second_1",),
            history=HistoryConfig(of="main", draw="latest", period=16, max_versions=2),
        ),
    }
    made = cases.small(MATCHES, policies, 4, **changes)
    return running.small(made, topology, frames, program=LOCK_STEP)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_a_league_in_lock_step_equals_a_single_process_bit_for_bit(tmp_path, topology):
    expected = running.run(in_tables(league("single_process")), tmp_path / "single")
    result = running.run(in_tables(league(topology)), tmp_path / "run")
    assert set(result.policies) == {"main", "exploiter"}
    assert result.policies == expected.policies
    assert result.learner_steps >= 5
    assert same_policies(learned(tmp_path / "run"), learned(tmp_path / "single"))
    for name, number in (("past", 3), ("newest", 2)):
        kept, its = (versions_in(tmp_path / run, name, "main") for run in ("run", "single"))
        assert cases.leaves_equal(kept, its)
        assert len(np.unique(kept["ids"])) == number


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif("TicTacToe-v1" not in library.names(), reason="needs games of EnvPool 1.2")
def test_a_policy_learns_a_game_of_envpool_against_another_one(tmp_path):
    """In Kuhn poker the best answer to random play wins more than 0.4 a game."""
    env = EnvConfig("KuhnPoker-v1", num_envs=32)
    experiment = against_random(env, "player_1", 16_000)
    evaluator = EvaluatorConfig(episodes=1_000, num_envs=50)
    result = running.run(dataclasses.replace(experiment, evaluator=evaluator), tmp_path / "run")
    assert result.eval_return_mean > 0.3


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif("TicTacToe-v1" not in library.names(), reason="needs games of EnvPool 1.2")
@pytest.mark.parametrize("topology", running.TOPOLOGIES)
def test_a_set_in_a_game_of_envpool_equals_a_single_process_bit_for_bit(tmp_path, topology):
    policies = {
        "first": MemberConfig(seats=(0,)),
        "second": MemberConfig(agent=cases.DQN, replay=cases.DQN_REPLAY),
    }
    made = cases.small(EnvConfig("TicTacToe-v1", num_envs=8), policies, 4)

    def run(topology, name):
        experiment = in_tables(running.small(made, topology, 400, program=LOCK_STEP))
        return running.run(experiment, tmp_path / name), learned(tmp_path / name)

    (expected, its_params), (result, params) = run("single_process", "one"), run(topology, "two")
    assert result.policies == expected.policies
    assert same_policies(params, its_params)
