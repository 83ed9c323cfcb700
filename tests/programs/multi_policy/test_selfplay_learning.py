"""Self-play ends near a mixed equilibrium, and beats its own past; exploiters find its gaps."""

import dataclasses
import io

import numpy as np
import pytest

import rlstack
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.envs.seats.connect_four import ConnectFour
from rlstack.envs.seats.rock_paper_scissors import exploitability, payoffs
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.tools.tournament import tournament
from tests.programs import running
from tests.programs.multi_policy import cases

THROWS = "rlstack.envs.seats.games:RockPaperScissors"


def throws(run_dir, policy):
    """The probabilities of rock, paper and scissors, of a policy of a run."""
    found = rlstack.load(run_dir, policy=policy).predict(np.ones(1, np.float32))
    return found.probabilities["action"].ravel()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rock_paper_scissors_ends_near_its_equilibrium(tmp_path):
    train.run(preset("rock-paper-scissors-selfplay"), tmp_path / "run", stream=io.StringIO())
    # It is 0.33 for a third each.
    assert exploitability(throws(tmp_path / "run", "learner"), rock=2.0) <= 0.12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_connect_four_beats_random_moves_and_its_own_past(tmp_path):
    train.run(preset("connect-four-selfplay"), tmp_path / "run", stream=io.StringIO())
    policy = rlstack.load(tmp_path / "run", policy="learner")
    rng, won = np.random.default_rng(1), []
    for number in range(400):
        game, seat, last = ConnectFour(), number % 2, False
        seen = game.reset()
        while not last:
            own = policy.act(seen[seat])
            other = rng.choice(np.flatnonzero(seen[1 - seat]["action_mask"]))
            step = game.step([own, other] if seat == 0 else [other, own])
            seen, last = step.observations, step.last
        won.append(step.rewards[seat] == 1)
    assert np.mean(won) >= 0.93  # 0.955 of 1,000 games on seed 1
    found = tournament(tmp_path / "run", games=100)
    assert np.mean(found.win_rates[-1, :-1]) >= 0.7


def exploiter_of(run_dir, topology="single_process", program=None):
    """An exploiter of the policy that a run ended with, in rock, paper, scissors."""
    env = EnvConfig(THROWS, num_envs=32, options={"rock": 2.0})
    policies = {
        "exploiter": MemberConfig(seats=("first",)),
        "target": MemberConfig(run=str(run_dir), run_policy="learner"),
    }
    agent = PPOConfig(
        discount=1.0,
        num_epochs=4,
        num_minibatches=1,
        entropy_cost=0.01,
        optimizer=OptimizerConfig(learning_rate=0.01),
    )
    evaluator = EvaluatorConfig(episodes=1_000, num_envs=50)
    experiment = cases.small(env, policies, 16, agent=agent)
    experiment = running.small(experiment, topology, 4_000, program=program)
    return dataclasses.replace(experiment, evaluator=evaluator)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("topology", ["single_process", "heavy_env", "distributed"])
def test_an_exploiter_finds_the_best_answer_to_a_mixed_policy(tmp_path, topology):
    env = dataclasses.replace(cases.THROWS, options={"rock": 2.0})
    running.run(dataclasses.replace(cases.selfplay(frames=40), env=env), tmp_path / "mixed")
    probabilities = throws(tmp_path / "mixed", "learner")
    assert probabilities.max() < 0.7
    experiment = exploiter_of(tmp_path / "mixed", topology, {"num_actors": 2})
    result = running.run(experiment, tmp_path / "run")
    answers = payoffs(2.0) @ probabilities
    assert throws(tmp_path / "run", "exploiter").argmax() == answers.argmax()
    # What it wins is the exploitability of the policy; the deviation of a throw is at most 2.
    assert result.eval_return_mean == pytest.approx(exploitability(probabilities, 2.0), abs=0.2)
