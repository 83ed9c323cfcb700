"""Whole runs with several policies: files, evaluation, resuming, frozen policies, commands."""

import dataclasses
import io
import json

import numpy as np
import pytest

import rlstack
from rlstack.acting.evaluator import by_policy
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build.policies.members import resolved
from rlstack.programs.cli import commands
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.run import plan, train
from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.tournament import tournament
from tests.programs.multi_policy.cases import CHAIN, DQN_REPLAY, PAST, RULE, chain, selfplay, small

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of three policies."""
    path = tmp_path_factory.mktemp("several") / "run"
    train.run(chain(), path, stream=io.StringIO())
    return path


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_leaves_the_logs_and_results_of_each_policy(run_dir):
    result = read_result(RunDir.open(run_dir))
    assert result.ended_by == "frames"
    assert set(result.policies) == {"retailer", "distributor"}
    own = result.policies.values()
    assert result.env_frames == sum(policy["env_frames"] for policy in own) >= 300
    assert result.learner_steps == min(policy["learner_steps"] for policy in own) > 0
    assert result.eval_episodes == sum(policy["eval_episodes"] for policy in own) == 8
    means = [policy["eval_return_mean"] for policy in own]
    assert result.eval_return_mean == pytest.approx(np.mean(means))
    *training, judged = lines_of(run_dir)
    assert judged["evaluator/episode_return"] == pytest.approx(result.eval_return_mean)
    assert judged["distributor/evaluator/episode_return"] == pytest.approx(means[1])
    assert training[-1]["distributor/learner/steps"] > training[-1]["retailer/learner/steps"] > 0
    assert any("retailer/learner/loss" in line for line in training)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_evaluation_of_the_run_gives_the_returns_again(run_dir, capsys):
    result = read_result(RunDir.open(run_dir))
    for params in ("last", "best"):
        found = by_policy(train.evaluate(run_dir, params=params))
        for name, returns in found.items():
            assert returns.mean() == pytest.approx(result.policies[name]["eval_return_mean"])
    assert commands.main("eval", [str(run_dir), "--episodes", "2"]) == 0
    assert set(json.loads(capsys.readouterr().out)["eval_return_by_policy"]) == set(found)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_resumes_to_a_new_budget(tmp_path):
    first = train.run(selfplay(frames=150), tmp_path / "run", stream=io.StringIO())
    second = train.resume(tmp_path / "run", frames=300, stream=io.StringIO())
    assert second.env_frames >= 300 > first.env_frames
    assert second.policies["learner"]["env_frames"] == second.env_frames
    frames = [line["env_frames"] for line in lines_of(tmp_path / "run")]
    assert frames == sorted(frames)
    played = tournament(tmp_path / "run", games=4, versions=2)
    assert len(played.names) == 3
    assert played.names[0] == "learner@0"
    assert played.names[-1] == f"learner@{second.env_frames}"
    np.testing.assert_array_equal(played.games, 4 * (1 - np.eye(3)))
    np.testing.assert_allclose(played.win_rates + played.win_rates.T, 1.0)
    summary = json.loads(json.dumps(played.summary()))
    for name in played.names:
        rating = summary["ratings"][name]
        assert rating["low"] <= rating["elo"] <= rating["high"]


@pytest.mark.slow
@pytest.mark.chosen
def test_a_version_of_the_last_frame_is_no_player_beside_the_newest_params(tmp_path):
    result = train.run(
        selfplay(frames=8 * PAST.history.period), tmp_path / "run", stream=io.StringIO()
    )
    played = tournament(tmp_path / "run", games=2, versions=3)
    assert played.names[0] == "learner@0"
    assert played.names[-1] == f"learner@{result.env_frames}"
    assert len(set(played.names)) == len(played.names) == 3


@pytest.mark.slow
@pytest.mark.chosen
def test_one_of_the_policies_can_be_loaded(run_dir):
    for name in ("retailer", "distributor"):
        policy = rlstack.load(run_dir, policy=name)
        assert policy.act(np.zeros((5, 7), np.float32)).shape == (5,)
    with pytest.raises(ValueError, match="factory has no params of its own"):
        rlstack.load(run_dir, policy="factory")
    with pytest.raises(ValueError, match="must have a policy of the name that is given"):
        rlstack.load(run_dir)


@pytest.mark.slow
@pytest.mark.chosen
def test_frozen_policies_play_the_agents_of_runs(run_dir, tmp_path):
    policies = {
        "retailer": MemberConfig(seats=(0,)),
        "others": MemberConfig(run=str(run_dir), run_policy="distributor", greedy=True),
    }
    experiment = resolved(small(CHAIN, policies, 4, frames=200))
    assert experiment.policies["others"].run.startswith(str(run_dir / "checkpoints"))
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert set(result.policies) == {"retailer"}
    assert any("others/actor/episode_return" in line for line in lines_of(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("member", "words"),
    [
        (MemberConfig(run="nowhere"), "policies.others.run: nowhere must be a run"),
        (MemberConfig(run="{run}"), "must have a policy of the name that is given"),
        (MemberConfig(run="{run}", run_policy="retailr"), "did you mean 'retailer'"),
    ],
)
def test_frozen_policies_that_do_not_exist_are_named(run_dir, tmp_path, member, words):
    member = dataclasses.replace(member, run=member.run.format(run=run_dir))
    experiment = small(CHAIN, {"retailer": MemberConfig(seats=(0,)), "others": member}, 4)
    with pytest.raises(ValueError, match=words):
        train.run(experiment, tmp_path / "run", stream=io.StringIO())


@pytest.mark.slow
@pytest.mark.chosen
def test_an_update_that_gives_nan_can_be_repeated(tmp_path):
    experiment = chain()
    scale = NormalisationConfig(reward_scale=float("inf"))
    member = dataclasses.replace(experiment.policies["distributor"], normalisation=scale)
    policies = {**experiment.policies, "distributor": member}
    experiment = dataclasses.replace(experiment, policies=policies)
    with pytest.raises(NonFiniteError, match="rlstack rerun") as caught:
        train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert not np.isfinite(train.rerun(str(caught.value).split("rlstack rerun ")[1])["loss"])


def test_a_plan_lists_the_policies(tmp_path):
    text = str(plan.plan(chain(), tmp_path / "run"))
    assert "retailer: PPOConfig, distributor: DQNConfig, factory: ScriptedConfig" in text
    assert "past: history" in str(plan.plan(selfplay(), tmp_path / "run"))


@pytest.mark.parametrize(
    ("topology", "trainers", "nodes"),
    [
        ("heavy_env", "one_each", "learner/distributor, learner/retailer, actor/0, actor/1"),
        ("heavy_env", "one", "coordinator, learner, actor/0, actor/1, evaluator"),
        ("light_env", "one_each", "inferencer/retailer/0, inferencer/distributor/0, actor/0"),
        ("distributed", "one", "replay/retailer, replay/distributor, learner, inferencer"),
    ],
)
def test_a_plan_lists_the_nodes_of_each_policy(tmp_path, topology, trainers, nodes):
    program = ProgramConfig(trainers=trainers, transport="zmq")
    table = dataclasses.replace(DQN_REPLAY, service="table")
    experiment = chain(topology=topology, program=program)
    replay = dataclasses.replace(experiment.replay, service="table")
    member = dataclasses.replace(experiment.policies["distributor"], replay=table)
    policies = {**experiment.policies, "distributor": member}
    experiment = dataclasses.replace(experiment, replay=replay, policies=policies)
    assert nodes in str(plan.plan(experiment, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.chosen
def test_commands_that_need_one_policy_say_so(run_dir, tmp_path, capsys):
    assert commands.main("record", [str(run_dir), "--out", str(tmp_path / "data")]) == 1
    assert "must be a run of one policy; it trained several" in capsys.readouterr().err
    assert commands.main("eval", [str(run_dir), "--tournament", "4"]) == 1
    assert "must be a run of self-play" in capsys.readouterr().err


def test_options_of_a_policy_are_set_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(to_json(chain()))
    options = ["--policies.distributor.agent.discount", "0.5", "--dry-run"]
    assert commands.main("train", [str(path), *options]) == 0
    assert '"discount": 0.5' in capsys.readouterr().out
    assert commands.main("train", [str(path), "--topology", "fused"]) == 1
    assert "env.type must be jax in the topology fused" in capsys.readouterr().err
    assert RULE.rule in path.read_text()
