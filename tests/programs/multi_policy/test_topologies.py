"""Several policies train in programs of several nodes, as in a single process."""

import dataclasses
import io
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.configs.normalisation import NormalisationConfig
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.policies.members import divide
from rlstack.programs.build.policies.versions import read_versions
from rlstack.programs.build.restored import read_params
from rlstack.programs.config.encoding import from_json
from rlstack.programs.config.member_config import HistoryConfig, MemberConfig
from rlstack.programs.program.multi_policy.versions import CopiedVersions, KeptVersions
from rlstack.programs.run import train
from rlstack.programs.run.launch import ProgramError
from rlstack.programs.tools.tournament import tournament
from rlstack.storage import checkpoint
from tests.programs.launched import FAST, Launched
from tests.programs.multi_policy.cases import chain, leaves_equal, selfplay
from tests.programs.running import (
    failures,
    metrics,
    nothing_left,
    params,
    ppo,
    run,
    same,
    series,
    small,
)

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")

LOCK_STEP = {"pacing": "lock_step"}
TWO_ACTORS = {"num_actors": 2}
LEARNING = ("retailer", "distributor")
_LATER = [pytest.mark.slow, pytest.mark.chosen]
HEAVY_FIRST = ["heavy_env", pytest.param("light_env", marks=_LATER)]


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def chains(topology, frames=600, program=None, **changes):
    """Four chains in a program: PPO, DQN and a rule."""
    experiment = chain(frames=frames, **changes)
    evaluator = experiment.evaluator
    made = in_tables(small(experiment, topology, frames, program=program))
    return dataclasses.replace(made, evaluator=evaluator, log_period=100)


def in_tables(experiment):
    """Reverb samples with random numbers of its own, so that no run of it is as another."""
    tables = {
        name: dataclasses.replace(member, replay=dataclasses.replace(replay, service="table"))
        if (replay := member.replay)
        else member
        for name, member in experiment.policies.items()
    }
    replay = dataclasses.replace(experiment.replay, service="table")
    return dataclasses.replace(experiment, policies=tables, replay=replay)


def learned(directory):
    """The params of the policies that learn, in the newest checkpoint, as lists of arrays."""
    experiment = from_json((directory / "config.json").read_text())
    path, spec = checkpoint.latest(directory / "checkpoints"), environment_spec(experiment)
    return {
        member.name: jax.tree.leaves(read_params(path, member.experiment, spec, policy=member.name))
        for member in divide(experiment).learning
    }


def same_policies(left, right):
    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A single process: its result, and the params of its policies."""
    directory = tmp_path_factory.mktemp("single") / "run"
    return run(chains("single_process"), directory), learned(directory)


@pytest.mark.parametrize(
    ("topology", "trainers"),
    [
        pytest.param("heavy_env", "one_each", marks=_LATER),
        pytest.param("heavy_env", "one", marks=_LATER),
        pytest.param("light_env", "one_each", marks=_LATER),
        pytest.param("distributed", "one", marks=_LATER),
    ],
)
def test_lock_step_equals_a_single_process_bit_for_bit(tmp_path, single, topology, trainers):
    expected, its_params = single
    program = {**LOCK_STEP, "trainers": trainers}
    result = run(chains(topology, program=program), tmp_path / "run")
    assert result.policies == expected.policies
    assert min(policy["learner_steps"] for policy in result.policies.values()) >= 10
    assert (result.env_frames, result.learner_steps) == (
        expected.env_frames,
        expected.learner_steps,
    )
    assert same_policies(learned(tmp_path / "run"), its_params)
    assert set(series(tmp_path / "run", "retailer/replay/lag_max")) == {0}


@pytest.mark.slow
@pytest.mark.chosen
def test_rounds_of_one_policy_and_one_actor_equal_a_single_process_bit_for_bit(tmp_path, single):
    expected, its_params = single
    experiment = chains("heavy_env", program=LOCK_STEP)
    rounds = dataclasses.replace(experiment.replay, min_actors=1)
    result = run(dataclasses.replace(experiment, replay=rounds), tmp_path / "run")
    assert result.policies == expected.policies
    assert same_policies(learned(tmp_path / "run"), its_params)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_set_of_one_policy_is_the_program_of_that_policy(tmp_path):
    one = ppo("heavy_env", frames=1600, program=LOCK_STEP)
    of_one = dataclasses.replace(one, policies={"all": MemberConfig()})
    expected, result = run(one, tmp_path / "one"), run(of_one, tmp_path / "of_one")
    assert result.learner_steps == expected.learner_steps >= 5
    assert result.eval_return_mean == expected.eval_return_mean
    assert same(learned(tmp_path / "of_one")["all"], params(tmp_path / "one"))
    (node,) = {p.name for p in (tmp_path / "of_one" / "checkpoints").iterdir()} - {"best"}
    assert node.startswith("step_")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("topology", "launch", "trainers"),
    [
        ("heavy_env", "processes", "one"),
        ("light_env", "threads", "one_each"),
        ("distributed", "threads", "one_each"),
        ("distributed", "launchpad", "one_each"),
    ],
)
def test_asynchronous_programs_leave_the_logs_and_results_of_each_policy(
    tmp_path, topology, launch, trainers
):
    program = {"launch": launch, "num_actors": 2, "num_inferencers": 2, "trainers": trainers}
    experiment = chains(topology, program=program, checkpoint_period=200)
    result = run(experiment, tmp_path / "run")
    assert result.topology == topology
    assert result.ended_by == "frames"
    own = [result.policies[name] for name in LEARNING]
    assert result.env_frames == sum(policy["env_frames"] for policy in own) >= 600
    assert result.learner_steps == min(policy["learner_steps"] for policy in own) > 0
    assert result.eval_episodes == sum(policy["eval_episodes"] for policy in own) == 8
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result._asdict()
    assert failures(tmp_path / "run") == []
    names = {name for line in metrics(tmp_path / "run") for name in line}
    for policy in LEARNING:
        wanted = ("learner/loss", "learner/steps", "actor/episode_return", "params/lag")
        assert {f"{policy}/{name}" for name in wanted} <= names
        assert np.isfinite(series(tmp_path / "run", f"{policy}/learner/loss")).all()
        assert f"{policy}/evaluator/episode_return" in names
    assert {"factory/actor/episode_return", "actor/episode_return", "learner/steps"} <= names
    judged = train.evaluate(tmp_path / "run")
    assert judged.returns.mean() == pytest.approx(result.eval_return_mean)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_resumes_with_the_updates_of_each_policy(tmp_path):
    first = run(chains("heavy_env", frames=300, checkpoint_period=150), tmp_path / "run")
    before = learned(tmp_path / "run")
    second = train.resume(tmp_path / "run", frames=600, stream=io.StringIO())
    assert second.env_frames >= 600 > first.env_frames
    for name in LEARNING:
        assert second.policies[name]["learner_steps"] > first.policies[name]["learner_steps"] > 0
        assert not same(learned(tmp_path / "run")[name], before[name])
    steps = series(tmp_path / "run", "distributor/replay/inserts")
    assert steps[-1] >= 300  # the second command goes on with the replay of the first
    frames = [line["env_frames"] for line in metrics(tmp_path / "run")]
    assert frames == sorted(frames)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("pacing", [pytest.param("asynchronous", marks=_LATER), "lock_step"])
def test_updates_are_a_budget_of_each_learner(tmp_path, pacing):
    """The distributor learns three times as often; the actors then go on for the retailer."""
    experiment = chains("heavy_env", frames=50_000, updates=12, program={"pacing": pacing})
    result = run(experiment, tmp_path / "run")
    assert result.ended_by == "updates"
    assert {
        name: policy["learner_steps"] for name, policy in result.policies.items()
    } == dict.fromkeys(LEARNING, 12)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("trainers", ["one_each", pytest.param("one", marks=_LATER)])
def test_a_learner_that_fails_is_named_and_its_update_can_be_made_again(tmp_path, trainers):
    experiment = chains("heavy_env", program={"trainers": trainers})
    scale = NormalisationConfig(reward_scale=float("inf"))
    member = dataclasses.replace(experiment.policies["distributor"], normalisation=scale)
    policies = {**experiment.policies, "distributor": member}
    experiment = dataclasses.replace(experiment, policies=policies)
    with pytest.raises(ProgramError, match="node learner/distributor failed") as caught:
        run(experiment, tmp_path / "run")
    dump = str(caught.value).split("rlstack rerun ")[1].split()[0].rstrip(".")
    assert not np.isfinite(train.rerun(dump)["loss"])


@pytest.mark.slow
@pytest.mark.chosen
def test_two_actors_in_lock_step_give_the_same_twice(tmp_path, monkeypatch):
    experiment = chains("heavy_env", frames=1200, program={**LOCK_STEP, **TWO_ACTORS})
    replay = dataclasses.replace(experiment.replay, batch_size=8, max_size=16)
    experiment = dataclasses.replace(experiment, replay=replay, checkpoint_period=400)
    results = [run(experiment, tmp_path / "one")]
    monkeypatch.setattr("rlstack.programs.session.timing.REPORT_PERIOD", 0.0)
    monkeypatch.setattr("rlstack.programs.session.timing.LEARNER_SAMPLE", 0.001)
    results.append(run(experiment, tmp_path / "two"))
    assert results[0].policies == results[1].policies
    assert same_policies(learned(tmp_path / "one"), learned(tmp_path / "two"))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["heavy_env", "light_env"])
def test_rounds_are_taken_for_each_policy(tmp_path, topology):
    experiment = chains(topology, frames=1200, program=TWO_ACTORS)
    rounds = dataclasses.replace(experiment.replay, min_actors=2, grace_seconds=5.0, max_size=64)
    policies = {
        **experiment.policies,
        "distributor": dataclasses.replace(
            experiment.policies["distributor"], agent=experiment.agent, replay=rounds
        ),
    }
    experiment = dataclasses.replace(experiment, replay=rounds, policies=policies)
    result = run(experiment, tmp_path / "run")
    for name in LEARNING:
        assert result.policies[name]["learner_steps"] >= 5
        assert series(tmp_path / "run", f"{name}/replay/round_actors")[-1] == 2
        assert set(series(tmp_path / "run", f"{name}/replay/dropped_stale")) == {0}


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("topology", "launch", "policy"),
    [
        ("heavy_env", "processes", "retailer"),
        ("heavy_env", "processes", "distributor"),
        ("heavy_env", "launchpad", "retailer"),
        ("light_env", "processes", "distributor"),
        ("light_env", "launchpad", "retailer"),
    ],
)
def test_a_killed_learner_of_one_policy_ends_the_program_with_its_name(
    tmp_path, topology, launch, policy
):
    options = (
        "--topology", topology, "--program.launch", launch, "--frames", 10_000_000,
        "--checkpoint-period", 1000,
    )  # fmt: skip
    run_dir = tmp_path / "run"
    with Launched(
        run_dir, "supply-chain-policies", *options, "--run-dir", run_dir, *FAST
    ) as program:
        program.wait_for_log("retailer/learner/loss")
        program.wait_for_checkpoint()
        program.kill(f"learner/{policy}")
        code, left = program.end(20.0)
    assert (code, left) == (1, [])
    assert f"node learner/{policy} failed: killed by SIGKILL" in program.stderr
    saved = program.saved_frames()
    result = train.resume(run_dir, frames=saved + 2000, stream=io.StringIO())
    assert result.env_frames >= saved + 2000


@pytest.mark.slow
@pytest.mark.chosen
def test_an_interrupted_program_saves_all_policies(tmp_path):
    options = ("--topology", "light_env", "--frames", 10_000_000)
    run_dir = tmp_path / "run"
    with Launched(
        run_dir, "supply-chain-policies", *options, "--run-dir", run_dir, *FAST
    ) as program:
        program.wait_for_log("distributor/learner/loss")
        program.process.send_signal(signal.SIGINT)
        code, left = program.end(30.0)
    assert (code, left) == (130, [])
    assert program.saved_frames() > 0
    assert set(learned(run_dir)) == set(LEARNING)
    assert not (run_dir / "checkpoints" / "parts").exists()


def test_rounds_and_updates_together_are_refused():
    experiment = chains("heavy_env")
    rounds = dataclasses.replace(experiment.replay, min_actors=1)
    with pytest.raises(ValueError, match="updates must be 0 with policies and replay"):
        dataclasses.replace(experiment, replay=rounds, updates=5)


def selfplays(topology, program=None, frames=200, **changes):
    """Four games of a learner against its past, whose versions are drawn by their win rates."""
    made = small(selfplay("prioritised", **changes), topology, frames, program=program)
    return dataclasses.replace(made, log_period=50, evaluator=selfplay().evaluator)


def versions_in(directory, name="past", of="learner"):
    """What the newest checkpoint has of the earlier versions of a policy."""
    experiment = from_json((directory / "config.json").read_text())
    path, spec = checkpoint.latest(directory / "checkpoints"), environment_spec(experiment)
    division = divide(experiment)
    own = read_params(path, division.members[of].experiment, spec, policy=of)
    return read_versions(path, division.members[name], own).save()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", HEAVY_FIRST)
def test_self_play_in_lock_step_equals_a_single_process_bit_for_bit(tmp_path, topology):
    expected = run(selfplays("single_process"), tmp_path / "single")
    result = run(selfplays(topology, LOCK_STEP), tmp_path / "run")
    assert result.policies == expected.policies
    assert result.learner_steps >= 5
    assert same_policies(learned(tmp_path / "run"), learned(tmp_path / "single"))
    kept, its = versions_in(tmp_path / "run"), versions_in(tmp_path / "single")
    assert leaves_equal(kept, its)
    assert len(np.unique(kept["ids"])) == 3
    assert np.any(kept["games"] > 0)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_self_play_resumes_with_its_versions(tmp_path, topology):
    run(selfplays(topology, {**TWO_ACTORS, "trainers": "one"}), tmp_path / "run")
    before = versions_in(tmp_path / "run")
    result = train.resume(tmp_path / "run", frames=400, stream=io.StringIO())
    after = versions_in(tmp_path / "run")
    assert after["ids"].max() > before["ids"].max() >= 2
    assert after["frames"].max() <= result.policies["learner"]["env_frames"]
    assert series(tmp_path / "run", "past/versions")[-1] > 1
    assert 0 < series(tmp_path / "run", "past/mean_win_rate")[-1] < 1
    played = tournament(tmp_path / "run", games=2, versions=2)
    assert played.names[-1].startswith("learner@")


def test_a_copy_of_versions_gets_what_it_lacks():
    cfg = HistoryConfig(of="learner", period=10, max_versions=3)
    params = {"w": np.zeros(2, np.float32)}

    class OfParams:
        def initial_params(self, rng_key):
            return jax.tree.map(jnp.asarray, params)

    class Learner:
        def exchange(self, *arguments):
            return kept.exchange(*arguments)

    kept = KeptVersions({"past": cfg}, {"w": np.ones(2, np.float32)})
    copy = CopiedVersions(cfg, "past", OfParams(), Learner())
    np.testing.assert_array_equal(copy.exchange(), [0])
    np.testing.assert_array_equal(copy.params(0)[1]["w"], [1, 1])
    kept.keep(5, {"w": np.full(2, 2, np.float32)})  # not due
    assert len(copy.exchange()) == 0
    for frames in (10, 20):
        kept.keep(frames, {"w": np.full(2, frames, np.float32)})
    np.testing.assert_array_equal(copy.exchange(), [1, 2])
    np.testing.assert_array_equal(copy.frames, [0, 10, 20])
    copy.record(2, 1.0)
    copy.record(1, 0.0)
    np.testing.assert_allclose(copy.win_rates, [0.5, 0.25, 0.75])
    kept.keep(40, {"w": np.full(2, 40, np.float32)})  # replaces the version of 10 frames
    np.testing.assert_array_equal(copy.exchange(), [1])
    np.testing.assert_array_equal(copy.params(1)[1]["w"], [40, 40])
    # The result against the version that is gone does not count for the new one.
    np.testing.assert_allclose(copy.win_rates, [0.5, 0.75, 0.5])
    assert leaves_equal(copy.save(), kept.save()["past"])
