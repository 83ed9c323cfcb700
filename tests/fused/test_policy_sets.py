"""Policy sets in the topology fused: equal to a single process and to runs of one policy."""

import dataclasses
import io
import json

import numpy as np
import pytest

import rlstack
from rlstack.acting.evaluator import by_policy
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.fused.loop import Limits
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build.policies.members import divide
from rlstack.programs.cli import commands
from rlstack.programs.config.experiment import EnvConfig, LearnerConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.config.presets.registry import on_policy_replay
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.run import train
from rlstack.programs.run.fused import Fused
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study import train as studies
from rlstack.programs.study.study import Study
from rlstack.replay import ReplayConfig
from rlstack.storage import checkpoint
from tests.fused.cases import STAY, called, close, counted, cover, mixed, on_policy, throws
from tests.fused.test_fused_run import dqn, ppo
from tests.programs.multi_policy.cases import DQN, leaves_equal, trained

pytestmark = pytest.mark.timeout(180)


def run(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO())


def lines_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").open()]


@pytest.mark.slow
@pytest.mark.chosen
def test_policies_learn_what_they_learn_in_a_single_process():
    single = SingleProcessRun(on_policy(topology="single_process"))
    try:
        trained(single, 4 * 8 + 1)
        fused = called(Fused(on_policy()), 100, updates=4)
        # The second policy has the shorter unroll, and waits with its budget spent.
        assert fused.by_policy() == single.by_policy()
        assert [one["learner_steps"] for one in fused.by_policy().values()] == [4, 4]
        assert counted(fused) == (single.env_frames, 4)
        assert fused.frames == {name: player.env_frames for name, player in single.players.items()}
        for name, params in single.learner.params.items():
            close(params, fused.learner.params[name])
        found, same = single.evaluate(), fused.evaluate()
        np.testing.assert_allclose(found.returns, same.returns, atol=1e-4)
        assert found.policies == same.policies
    finally:
        single.close()


@pytest.mark.slow
@pytest.mark.chosen
def test_dqn_next_to_ppo_learns_what_it_learns_in_a_single_process():
    # A replay of one item: the draws are the same, whatever draws them.
    replay = ReplayConfig(
        sampler="uniform", batch_size=1, unroll_length=1, max_size=1, samples_per_insert=1.0
    )
    policies = {
        "deep": MemberConfig(seats=(0,), agent=DQN, replay=replay),
        "actor": MemberConfig(seats=(2,)),
        "ruled": MemberConfig(agent=STAY),
    }
    fields = {"games": 1, "rows": 1}
    single = SingleProcessRun(cover(policies, topology="single_process", **fields))
    try:
        trained(single, 31)
        fused = called(Fused(cover(policies, **fields)), 30)
        assert fused.by_policy() == single.by_policy()
        assert fused.by_policy()["deep"]["learner_steps"] > 10
        assert fused.by_policy()["actor"]["learner_steps"] == 3
        for name, params in single.learner.params.items():
            close(params, fused.learner.params[name])
    finally:
        single.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param(ppo, marks=pytest.mark.chosen), dqn])
def test_a_set_of_one_policy_is_the_run_of_that_policy(make):
    one = called(Fused(make()), 20)
    of_one = called(Fused(make(policies={"all": MemberConfig()})), 20)
    assert counted(one) == counted(of_one)
    assert one.learner.version > 5
    assert leaves_equal(one.learner.save(), {"all": of_one.learner.save()})
    assert leaves_equal(one.state, of_one.state)  # also environments and replay
    one.restart_environments()
    of_one.restart_environments()
    assert leaves_equal(one.state.acting, of_one.state.acting)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [pytest.param(mixed, marks=pytest.mark.chosen), lambda: throws("prioritised")],
)
def test_a_resumed_set_equals_an_uninterrupted_one(tmp_path, make):
    unbroken, resumed = called(Fused(make()), 20), Fused(make())
    checkpoint.save(tmp_path, unbroken.env_frames, unbroken.save(), {})
    resumed.load(checkpoint.restore(checkpoint.latest(tmp_path), resumed.template()))
    assert resumed.by_policy() == unbroken.by_policy()
    called(unbroken, 20)
    called(resumed, 20)
    assert resumed.by_policy() == unbroken.by_policy()
    assert min(one["learner_steps"] for one in resumed.by_policy().values()) > 3
    assert leaves_equal(unbroken.save(), resumed.save())


@pytest.mark.slow
@pytest.mark.chosen
def test_the_loop_is_compiled_once_and_a_restart_breaks_the_streams():
    loop = called(Fused(mixed()), 5)
    before = loop.learner.version, loop.env_frames
    loop.restart_environments()
    assert int(loop.state.replay["actor"].held) == 1
    ring = loop.state.replay["deep"]
    assert int(ring.unbroken) == int(ring.steps_added) - 1
    called(loop, 9)
    assert loop._run._cache_size() == 1
    assert (loop.learner.version, loop.env_frames) > before


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of three policies, with evaluations in between."""
    path = tmp_path_factory.mktemp("fused") / "run"
    evaluator = EvaluatorConfig(episodes=4, num_envs=4, period=150)
    run(mixed(frames=300, evaluator=evaluator), path)
    return path


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_leaves_the_logs_and_results_of_each_policy(run_dir):
    result = read_result(RunDir.open(run_dir))
    assert (result.ended_by, result.topology) == ("frames", "fused")
    assert set(result.policies) == {"actor", "deep"}
    own = result.policies.values()
    assert result.env_frames == sum(policy["env_frames"] for policy in own) >= 300
    assert result.learner_steps == min(policy["learner_steps"] for policy in own) > 0
    assert result.eval_episodes == 8
    lines = lines_of(run_dir)
    evaluated = [line["env_frames"] for line in lines if "evaluator/episode_return" in line]
    assert [frames // 150 for frames in evaluated] == [1, 2]
    names = {name for line in lines for name in line}
    assert {"ruled/actor/episode_return", "deep/actor/episode_return"} <= names
    assert {"actor/learner/loss", "deep/learner/loss", "actor/episode_length"} <= names
    last = [line for line in lines if "deep/learner/steps" in line][-1]
    assert last["deep/replay/samples"] == 8 * last["deep/learner/steps"]
    lengths = {line["deep/actor/episode_length"] for line in lines if "actor/learner/loss" in line}
    assert lengths == {5.0}


@pytest.mark.slow
@pytest.mark.chosen
def test_commands_use_a_run_as_any_other(run_dir, tmp_path):
    result = read_result(RunDir.open(run_dir))
    for name, returns in by_policy(train.evaluate(run_dir)).items():
        assert returns.mean() == pytest.approx(result.policies[name]["eval_return_mean"])
    policy = rlstack.load(run_dir, policy="deep")
    assert policy.act(np.zeros((5, 12), np.float32)).shape == (5,)
    page = tmp_path / "report.md"
    assert commands.main("report", [str(run_dir), "--out", str(page)]) == 0
    assert "small" in page.read_text()
    resumed = train.resume(run_dir, frames=600, stream=io.StringIO())
    assert resumed.env_frames >= 600 > result.env_frames
    frames = [line["env_frames"] for line in lines_of(run_dir)]
    assert frames == sorted(frames)


@pytest.mark.slow
@pytest.mark.chosen
def test_drawn_seats_are_permutations_within_games_that_last_an_episode():
    loop = Fused(mixed(seating="drawn"))
    places = loop._parts.loop._actors.places
    seen, before = set(), None
    for _ in range(40):
        loop.call(Limits(1))
        acting = loop.state.acting
        rows = np.asarray(acting.seating.rows)
        assert sorted(rows) == list(range(12))
        # A policy has one place in each game.
        for at in places.values():
            np.testing.assert_array_equal(rows[at] // 3, range(4))
        seen |= set((rows[places["deep"]] % 3).tolist())
        begins = np.asarray(acting.timestep.first()).all()
        if before is not None and not begins:
            np.testing.assert_array_equal(rows, before)
        before = rows
    assert seen == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.chosen
def test_frozen_policies_play_the_agents_of_runs(run_dir, tmp_path):
    policies = {
        "actor": MemberConfig(seats=(0,)),
        "others": MemberConfig(run=str(run_dir), run_policy="deep", greedy=True),
    }
    stop, evaluator = (
        StopConfig(return_reached=-1e3),
        EvaluatorConfig(episodes=4, num_envs=4, period=50),
    )
    result = run(cover(policies, stop=stop, evaluator=evaluator), tmp_path / "run")
    assert "return_reached" in result.ended_by
    assert set(result.policies) == {"actor"}
    assert any("others/actor/episode_return" in line for line in lines_of(tmp_path / "run"))


@pytest.mark.slow
def test_an_update_that_gives_nan_names_its_policy(tmp_path):
    scale = NormalisationConfig(reward_scale=float("inf"))
    experiment = mixed()
    member = dataclasses.replace(experiment.policies["actor"], normalisation=scale)
    experiment = dataclasses.replace(experiment, policies={**experiment.policies, "actor": member})
    with pytest.raises(NonFiniteError, match="rlstack rerun") as caught:
        run(experiment, tmp_path / "run")
    assert not np.isfinite(train.rerun(str(caught.value).split("rlstack rerun ")[1])["loss"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learner": LearnerConfig(devices=(0,))}, "policies.deep: .*devices must be empty"),
        ({"env": EnvConfig("CartPole-v1", 12)}, "env.type must be jax"),
        (
            {"replay": ReplayConfig(sampler="uniform", batch_size=4, unroll_length=1, max_size=99)},
            "policies.actor: .*samples_per_insert must be given",
        ),
    ],
)
def test_what_a_set_does_not_run_is_said_before_anything_starts(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(mixed(), **changes)


def test_batches_must_fit_the_rows_of_a_policy():
    with pytest.raises(ValueError, match=r"policies.actor: .*divisor of env.num_envs \(4\)"):
        divide(mixed(replay=on_policy_replay(6, 8)))


@pytest.mark.slow
def test_several_seeds_of_a_set_run_one_after_the_other(tmp_path):
    ended = studies.run(Study(mixed(frames=300), (1, 2)), tmp_path / "set", stream=io.StringIO())
    assert [set(one.result.policies) for one in ended] == 2 * [{"actor", "deep"}]
