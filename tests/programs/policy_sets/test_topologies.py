"""Several policies train in programs of several nodes, as in a single process."""

import dataclasses
import io
import json
import signal

import jax
import numpy as np
import pytest

from programs.components.environments import environment_spec
from programs.components.restored import read_params
from programs.experiment import from_json
from programs.member_config import MemberConfig
from programs.policy_sets.members import divide
from programs.run import train
from programs.run.launch import ProgramError
from rlstack.families.normalised import NormalisationConfig
from rlstack.storage import checkpoint
from tests.programs.launched import FAST, Launched
from tests.programs.policy_sets.cases import chain, selfplay
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
HEAVY_FIRST = [
    "heavy_env",
    pytest.param("light_env", marks=_LATER),
    pytest.param("distributed", marks=_LATER),
]


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def chains(topology, frames=600, program=None, **changes):
    """Four chains in a program: PPO, DQN and a rule."""
    experiment = chain(frames=frames, **changes)
    evaluator = experiment.evaluator
    made = small(experiment, topology, frames, program=program)
    # Reverb samples with random numbers of its own.
    tables = {
        name: dataclasses.replace(member, replay=dataclasses.replace(replay, service="table"))
        if (replay := member.replay)
        else member
        for name, member in made.policies.items()
    }
    replay = dataclasses.replace(made.replay, service="table")
    return dataclasses.replace(
        made, evaluator=evaluator, log_period=100, policies=tables, replay=replay
    )


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


@pytest.mark.parametrize("topology", HEAVY_FIRST)
def test_lock_step_equals_a_single_process_bit_for_bit(tmp_path, single, topology):
    expected, its_params = single
    result = run(chains(topology, program=LOCK_STEP), tmp_path / "run")
    assert result.policies == expected.policies
    assert min(policy["learner_steps"] for policy in result.policies.values()) >= 10
    assert (result.env_frames, result.learner_steps) == (
        expected.env_frames,
        expected.learner_steps,
    )
    assert same_policies(learned(tmp_path / "run"), its_params)
    assert set(series(tmp_path / "run", "retailer/replay/lag_max")) == {0}


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
    ("topology", "launch"),
    [
        ("heavy_env", "processes"),
        ("light_env", "threads"),
        ("distributed", "threads"),
        ("distributed", "launchpad"),
    ],
)
def test_asynchronous_programs_leave_the_logs_and_results_of_each_policy(
    tmp_path, topology, launch
):
    program = {"launch": launch, "num_actors": 2, "num_inferencers": 2}
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


@pytest.mark.parametrize("pacing", ["asynchronous", "lock_step"])
def test_updates_are_a_budget_of_each_learner(tmp_path, pacing):
    """The distributor learns three times as often; the actors then go on for the retailer."""
    experiment = chains("heavy_env", frames=50_000, updates=12, program={"pacing": pacing})
    result = run(experiment, tmp_path / "run")
    assert result.ended_by == "updates"
    assert {
        name: policy["learner_steps"] for name, policy in result.policies.items()
    } == dict.fromkeys(LEARNING, 12)


def test_a_learner_that_fails_is_named_and_its_update_can_be_made_again(tmp_path):
    experiment = chains("heavy_env")
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
    monkeypatch.setattr("programs.timing.REPORT_PERIOD", 0.0)
    monkeypatch.setattr("programs.timing.LEARNER_SAMPLE", 0.001)
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
@pytest.mark.parametrize("policy", LEARNING)
def test_a_killed_learner_of_one_policy_ends_the_program_with_its_name(tmp_path, policy):
    options = ("--topology", "heavy_env", "--frames", 10_000_000, "--checkpoint-period", 1000)
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


def test_earlier_versions_play_in_a_single_process_only():
    with pytest.raises(
        ValueError, match="topology must be single_process with a policy of earlier"
    ):
        dataclasses.replace(selfplay(), topology="heavy_env")
