"""Runs that act after learning from data, demonstrations in batches, and sets of datasets."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest

from rlstack.agents import AGENTS
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.cli import commands as cli
from rlstack.programs.config.encoding import from_json
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import PRESETS, preset
from rlstack.programs.run import record as record_module
from rlstack.programs.run import train
from rlstack.programs.run.offline import OfflineFirst, resolve_dataset
from rlstack.programs.run.plan import plan
from rlstack.programs.run.record import record, record_sets
from rlstack.storage import checkpoint
from rlstack.storage.datasets import Dataset, DatasetError

JUDGED = EvaluatorConfig(episodes=2, num_envs=2)


def quiet(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO())


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A run of Catch with many checkpoints, whose policy gets better."""
    directory = tmp_path_factory.mktemp("learned") / "run"
    base = preset("cartpole-ppo")
    experiment = dataclasses.replace(
        base,
        env=EnvConfig("tests.envs.toy:Catch", num_envs=8, options={"rows": 5, "columns": 3}),
        frames=12_000,
        checkpoint_period=1_000,
        checkpoints_kept=20,
        evaluator=EvaluatorConfig(episodes=50, num_envs=10),
    )
    quiet(experiment, directory)
    return directory


@pytest.fixture(scope="module")
def data(learned, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "set"
    record(learned, path, frames=600, policy="explore")
    return path


def first(recorded, **changes):
    """Discrete CQL that learns from the dataset, and then acts."""
    base = preset("cartpole-cql")
    replay = dataclasses.replace(
        base.replay, batch_size=16, min_size=40, max_size=400, samples_per_insert=4.0
    )
    env = EnvConfig("tests.envs.toy:Catch", num_envs=2, options={"rows": 5, "columns": 3})
    return dataclasses.replace(
        base,
        **{
            "data": str(recorded),
            "env": env,
            "replay": replay,
            "offline_updates": 30,
            "frames": 200,
            "log_period": 160,
            "checkpoint_period": 10_000,
            "evaluator": JUDGED,
            **changes,
        },
    )


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").open()]


def params(directory):
    path = checkpoint.latest(directory / "checkpoints")
    loop = OfflineFirst(from_json((directory / "config.json").read_text()))
    try:
        loop.load(checkpoint.restore(path, loop.template()))
        return [np.asarray(x) for x in jax.tree.leaves(loop.learner.save())]
    finally:
        loop.close()


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_learns_from_data_and_then_acts_each_with_its_budget(data, tmp_path):
    result = quiet(first(data), tmp_path / "run")
    # 30 batches of 16 steps, and 200 acted; updates of a fourth of a batch for each of these.
    assert result.env_frames == 30 * 16 + 200
    assert result.learner_steps > 30
    assert result.ended_by == "frames"
    found = lines(tmp_path / "run")
    before = [x for x in found if x.get("learner/steps", 99) <= 30 and "learner/loss" in x]
    assert [x["env_frames"] for x in before] == [160, 320, 480]
    assert not any("actor/episode_return" in x or x["replay/size"] for x in before)
    assert before[-1]["dataset/epochs"] == pytest.approx(480 / before[-1]["dataset/windows"])
    assert any("actor/episode_return" in x for x in found)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("updates", [10, 30])
def test_a_run_that_is_interrupted_in_or_after_the_data_goes_on_as_it_would_have(
    data, tmp_path, updates
):
    """The second ends right before the first step is acted, so no episode is abandoned."""
    quiet(first(data), tmp_path / "whole")
    quiet(first(data, updates=updates), tmp_path / "broken")
    again = train.resume(tmp_path / "broken", updates=0, stream=io.StringIO())
    assert again.env_frames == 30 * 16 + 200
    if updates == 10:
        pairs = zip(params(tmp_path / "whole"), params(tmp_path / "broken"), strict=True)
        assert all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "offline_updates must be at least 0, and 0 without data"),
        ({"offline_updates": -1}, "offline_updates must be at least 0"),
        ({"topology": "fused"}, "topology must be single_process with data"),
    ],
)
def test_contradictions_are_refused(data, changes, message):
    with pytest.raises(ValueError, match=message):
        first(data, **changes)


def test_agents_say_which_recorded_steps_they_lack(data):
    cloned = dataclasses.replace(preset("cartpole-bc"), data=str(data), offline_updates=5)
    with pytest.raises(ValueError, match=r"offline_updates must be 0 for BC"):
        resolve_dataset(cloned)
    with pytest.raises(ValueError, match=r"give --data or --replay\.demonstrations DATASET_DIR"):
        resolve_dataset(preset("hopper-iql"))
    with pytest.raises(ValueError, match=r"replay\.demonstrations must be given for pendulum-gail"):
        resolve_dataset(dataclasses.replace(preset("pendulum-gail"), data=str(data)))


def test_a_plan_names_both_budgets(data):
    text = str(plan(first(data)))
    assert "30 updates from data, then 200 frames" in text
    assert "replay  " in text and str(data) in text
    assert "3 are kept" in text


def with_demonstrations(data, **changes):
    base = first(data, data="", offline_updates=0)
    replay = dataclasses.replace(base.replay, demonstrations=str(data))
    return dataclasses.replace(base, replay=replay, **changes)


def test_demonstrations_are_learned_beside_the_replay_and_resume_exactly(data, tmp_path):
    experiment = with_demonstrations(data)
    loop = train.SingleProcessRun(experiment)
    try:
        for _ in range(40):
            loop.player.actor.step()
        sample = loop.player.replay.sample()
        saved = loop.save()
        logs = loop.learner.step(sample)
        loop.load(checkpoint.restore(checkpoint.save(tmp_path, 1, saved, {}), loop.template()))
        assert loop.learner.step(sample) == logs  # the draws are part of the learner's state
    finally:
        loop.close()
    replay = dataclasses.replace(experiment.replay, demonstrations="")
    plain = train.SingleProcessRun(dataclasses.replace(experiment, replay=replay))
    try:
        assert plain.learner.step(sample) != logs
    finally:
        plain.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"demonstration_share": 1.0}, "demonstration_share must be in"),
        ({"sampler": "fifo", "demonstrations": "d"}, "demonstrations must be empty with the"),
    ],
)
def test_options_of_demonstrations_are_checked(changes, message):
    base = preset("cartpole-dqn").replay
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(base, **{"samples_per_insert": None, "min_size": 1, **changes})


def test_demonstrations_must_fit_the_environment(data, tmp_path):
    experiment = with_demonstrations(data, env=EnvConfig("CartPole-v1", num_envs=2))
    with pytest.raises(DatasetError, match=r"replay\.demonstrations .* the recorded steps must be"):
        quiet(experiment, tmp_path / "run")
    missing = with_demonstrations(tmp_path / "none")
    with pytest.raises(DatasetError, match="must be a dataset"):
        quiet(missing, tmp_path / "run")


def test_sets_of_a_run_differ_as_their_names_say(learned, tmp_path):
    said = []
    made = record_sets(learned, tmp_path / "sets", frames=400, seed=3, tell=said.append)
    assert list(made) == ["random", "medium-replay", "medium", "expert"]
    headers = {name: header for name, (_, header) in made.items()}
    assert all(header.frames >= 400 for header in headers.values())
    # Catch pays 1 or -1; of three columns a random paddle finds the right one in a third.
    assert headers["random"].return_mean < 0.2
    assert headers["expert"].return_mean > 0.9
    assert headers["random"].return_mean < headers["expert"].return_mean
    assert headers["random"].source["agent"] == "RandomConfig"
    assert headers["expert"].source["policy"] == "greedy"
    medium = headers["medium"].source["trained_frames"]
    assert 0 < medium <= headers["expert"].source["trained_frames"]
    assert headers["medium-replay"].source["trained_frames"] == medium
    assert len(said) == 4 and said[0].startswith("random: return ")
    assert Dataset(tmp_path / "sets" / "medium-replay").header.steps > 400


def test_a_run_that_is_no_better_than_chance_has_no_sets(learned, tmp_path, monkeypatch):
    monkeypatch.setattr(
        record_module, "_returns", lambda directory, cfg, saved, _: [-9.0] * len(saved)
    )
    with pytest.raises(ValueError, match=r"better than random actions, .* the best one has -9\.0"):
        record_sets(learned, tmp_path / "sets", frames=100, tell=lambda _: None)
    assert not list((tmp_path / "sets").iterdir())


def test_sets_need_checkpoints_and_no_policy(data, tmp_path, capsys):
    quiet(first(data, offline_updates=5, frames=20), tmp_path / "short")
    with pytest.raises(ValueError, match="must have at least 5 checkpoints for --sets"):
        record_sets(tmp_path / "short", tmp_path / "sets")
    arguments = [str(tmp_path / "short"), "--sets", "--policy", "explore"]
    assert cli.main("record", arguments) == 2
    assert "leave out --policy" in capsys.readouterr().err


def test_presets_from_data_are_of_agents_that_need_it():
    names = {name for name in PRESETS if AGENTS[type(preset(name).agent)].recorded}
    kinds = {AGENTS[type(preset(name).agent)].agent.__name__ for name in names}
    assert kinds == {"IQL", "TD3BC", "CQL", "DiscreteCQL", "AWAC", "GAIL", "SQIL"}
