"""Recording runs, and runs that learn from the recordings."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.programs.build.environments import make_evaluation_env
from rlstack.programs.cli import commands as cli
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.offline import Offline, resolve_dataset
from rlstack.programs.run.record import record
from rlstack.replay import ReplayConfig
from rlstack.storage import checkpoint
from rlstack.storage.checkpoint import CheckpointError
from rlstack.storage.datasets import Dataset, DatasetError

JUDGED = EvaluatorConfig(episodes=2, num_envs=2)


def quiet(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO())


@pytest.fixture(scope="module")
def expert(tmp_path_factory):
    """A run of the scripted expert, with a dataset of a few episodes."""
    directory = tmp_path_factory.mktemp("expert") / "run"
    experiment = dataclasses.replace(preset("cartpole-scripted"), frames=600, evaluator=JUDGED)
    quiet(experiment, directory)
    record(directory, frames=2000)
    return directory


def cloning(expert, **changes):
    return dataclasses.replace(
        preset("cartpole-bc"),
        **{
            "data": str(expert / "dataset"),
            "frames": 10_240,
            "log_period": 2_560,
            "evaluator": JUDGED,
            **changes,
        },
    )


def params(directory):
    path = checkpoint.latest(directory / "checkpoints")
    program = Offline(from_json((directory / "config.json").read_text()))
    program.load(checkpoint.restore(path, program.template()))
    return [np.asarray(x) for x in jax.tree.leaves(program.learner.save())]


def same(left, right):
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def test_a_recording_has_whole_episodes_of_the_run(expert):
    header = Dataset(expert / "dataset").header
    assert (header.frames, header.episodes, header.return_mean) == (2000, 4, 500.0)
    assert header.env == {"name": "CartPole-v1", "type": "auto", "options": {}}
    source = header.source
    assert source["run"] == str(expert) and source["preset"] == "cartpole-scripted"
    assert (source["agent"], source["policy"], source["seed"]) == ("ScriptedConfig", "greedy", 1)
    assert source["trained_frames"] >= 600


def test_recordings_repeat_with_the_seed_and_differ_from_evaluation(expert, tmp_path):
    def steps(name, **options):
        record(expert, tmp_path / name, frames=100, **options)
        return Dataset(tmp_path / name).read(np.arange(200))[0].observation

    first = steps("a")
    assert np.array_equal(first, steps("b"))
    assert not np.array_equal(first, steps("c", seed=2))
    with make_evaluation_env(preset("cartpole-scripted")) as env:
        assert not np.isin(first[0], env.reset().observation).any()


@pytest.mark.slow
@pytest.mark.chosen
def test_recording_uses_the_environment_of_evaluation(tmp_path):
    experiment = dataclasses.replace(
        preset("cartpole-random"),
        env=EnvConfig(
            "rlstack.envs.toy:MemoryCue", 2, options={"num_cues": 3}, eval_options={"delay": 1}
        ),
        replay=dataclasses.replace(preset("cartpole-random").replay, batch_size=2),
        frames=64,
        evaluator=JUDGED,
    )
    quiet(experiment, tmp_path / "run")
    path, header = record(tmp_path / "run", tmp_path / "d", frames=10)
    assert path == tmp_path / "d"
    assert header.env["options"] == {"num_cues": 3, "delay": 1}
    assert header.spec.observation.shape == (4,)
    # The generic preset takes the environment from the header.
    generic = dataclasses.replace(preset("bc"), data=str(path), frames=512, evaluator=JUDGED)
    found = resolve_dataset(generic)
    assert found.env.name == "rlstack.envs.toy:MemoryCue"
    assert found.env.options == header.env["options"]
    result = quiet(generic, tmp_path / "bc")
    assert result.eval_episodes == 2


@pytest.mark.slow
@pytest.mark.chosen
def test_recording_explores_as_at_the_end_of_training(tmp_path):
    base = preset("cartpole-dqn")
    agent = dataclasses.replace(base.agent, epsilon_start=1.0, epsilon_end=0.0, epsilon_frames=800)
    quiet(dataclasses.replace(base, agent=agent, frames=1000, evaluator=JUDGED), tmp_path / "run")
    record(tmp_path / "run", tmp_path / "greedy", frames=60)
    record(tmp_path / "run", tmp_path / "explore", frames=60, policy="explore")
    # Epsilon has fallen to 0, so exploration equals greedy acting.
    greedy, explore = (Dataset(tmp_path / name) for name in ("greedy", "explore"))
    every = np.arange(greedy.header.steps)
    assert greedy.header.steps == explore.header.steps
    assert np.array_equal(greedy.read(every)[1], explore.read(every)[1])
    assert explore.header.source["policy"] == "explore"


def test_recording_needs_a_checkpoint_and_an_empty_directory(expert, tmp_path):
    with pytest.raises(ValueError, match="must be the directory of a run"):
        record(tmp_path)
    with pytest.raises(DatasetError, match="must be new or empty"):
        record(expert)
    with pytest.raises(ValueError, match="frames must be at least 1"):
        record(expert, tmp_path / "d", frames=0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_data_writes_the_files_of_every_run(expert, tmp_path):
    stream = io.StringIO()
    result = train.run(cloning(expert), tmp_path / "run", stream=stream)
    assert "dataset: 2,000 frames in 4 episodes of return 500.0" in stream.getvalue()
    assert result.env_frames == 10_240
    assert result.learner_steps == 10_240 // 256
    assert result.eval_episodes == 2
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result._asdict()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    training = [line for line in lines if "learner/loss" in line]
    evaluation = lines[-1]
    assert [line["env_frames"] for line in training] == [2_560, 5_120, 7_680, 10_240]
    assert evaluation["env_frames"] == 10_240
    assert evaluation["evaluator/episode_return"] == result.eval_return_mean
    assert training[-1]["learner/loss"] < training[0]["learner/loss"]
    assert training[-1]["dataset/epochs"] == pytest.approx(10_240 / 2_000)
    again = train.evaluate(tmp_path / "run")
    assert again.returns.mean() == result.eval_return_mean


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("relative", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(expert, tmp_path, monkeypatch, relative):
    experiment = cloning(expert)
    if relative:
        monkeypatch.chdir(expert)
        experiment = dataclasses.replace(experiment, data="dataset")
    quiet(experiment, tmp_path / "unbroken")
    # 3,840 frames end within an epoch, so a resumed run depends on the position in the dataset.
    quiet(dataclasses.replace(experiment, frames=3_840), tmp_path / "broken")
    monkeypatch.chdir(tmp_path)
    assert not same(params(tmp_path / "unbroken"), params(tmp_path / "broken"))
    second = train.resume(tmp_path / "broken", frames=10_240, stream=io.StringIO())
    assert second.env_frames == 10_240
    assert same(params(tmp_path / "unbroken"), params(tmp_path / "broken"))


def test_a_changed_or_missing_dataset_is_refused_on_resume(expert, tmp_path):
    record(expert, tmp_path / "d", frames=600)
    quiet(cloning(expert, data=str(tmp_path / "d"), frames=512), tmp_path / "run")
    os.rename(tmp_path / "d", tmp_path / "old")
    with pytest.raises(DatasetError, match="must be a dataset"):
        train.resume(tmp_path / "run", frames=1024, stream=io.StringIO())
    record(expert, tmp_path / "d", frames=600, seed=5)
    with pytest.raises(CheckpointError, match="must be the dataset that the run in"):
        train.resume(tmp_path / "run", frames=1024, stream=io.StringIO())


def test_an_off_policy_agent_learns_from_data_too(expert, tmp_path):
    base = preset("cartpole-dqn")
    experiment = dataclasses.replace(
        base, data=str(expert / "dataset"), frames=8 * 128 * 10, evaluator=JUDGED
    )
    result = quiet(experiment, tmp_path / "run")
    assert result.learner_steps == 10
    assert result.env_frames == 8 * 128 * 10


@pytest.mark.parametrize(
    ("name", "changes", "hint"),
    [
        ("cartpole-ppo", {}, "needs action, behaviour_log_prob, value"),
        ("cartpole-bc", {"topology": "heavy_env"}, "topology must be single_process with data"),
        ("cartpole-bc", {"data": ""}, "--data DATASET_DIR"),
        ("bc", {"data": ""}, "--data DATASET_DIR"),
        ("cartpole-bc", {"data": "/no/such/data"}, "/no/such/data must be a dataset"),
        ("cartpole-bc", {"env": EnvConfig("Acrobot-v1")}, "observation is float32"),
        (
            "cartpole-bc",
            {"normalisation": NormalisationConfig(rewards="return")},
            "--normalisation.rewards reward",
        ),
    ],
)
def test_configs_that_do_not_work_with_data_are_refused(expert, tmp_path, name, changes, hint):
    with pytest.raises(ValueError) as caught:
        quiet(
            dataclasses.replace(preset(name), **{"data": str(expert / "dataset"), **changes}),
            tmp_path / "run",
        )
    assert hint in str(caught.value)


def test_a_dataset_names_no_function_to_call(expert, tmp_path):
    """Its environment would be made by a call of any function, with any options."""
    shutil.copytree(expert / "dataset", tmp_path / "d")
    file = tmp_path / "d" / "dataset.json"
    fields = json.loads(file.read_text())
    del fields["crc32"]
    command = f"touch {tmp_path / 'called'}"
    fields["env"] = {"name": "subprocess:getoutput", "type": "auto", "options": {"cmd": command}}
    file.write_text(json.dumps(fields))
    experiment = dataclasses.replace(preset("bc"), data=str(tmp_path / "d"), evaluator=JUDGED)
    with pytest.raises(ValueError, match=r"add --env\.name subprocess:getoutput"):
        quiet(experiment, tmp_path / "run")
    assert not (tmp_path / "called").exists()
    named = dataclasses.replace(experiment, env=EnvConfig("CartPole-v1"), frames=512)
    said = io.StringIO()
    train.run(named, tmp_path / "run", stream=said)
    assert "note: " in said.getvalue() and "no checksum" in said.getvalue()


@pytest.mark.slow
@pytest.mark.chosen
def test_normalised_observations_are_learned_from_data(expert, tmp_path):
    experiment = cloning(expert, normalisation=NormalisationConfig(observations=True))
    quiet(experiment, tmp_path / "run")
    program = Offline(from_json((tmp_path / "run" / "config.json").read_text()))
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    program.load(checkpoint.restore(path, program.template()))
    statistics = program.learner.params.statistics.observation
    timestep, _ = program.dataset.read(np.arange(program.dataset.header.steps))
    seen = timestep.observation[timestep.step_type != 2]
    np.testing.assert_allclose(np.hstack(statistics.mean), seen.mean(axis=0), atol=0.02)


def test_the_commands(expert, tmp_path, capsys):
    assert cli.main("record", [str(expert), "--out", str(tmp_path / "d"), "--frames", "600"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dataset"] == str(tmp_path / "d")
    assert said["frames"] >= 600 and said["return_mean"] == 500.0
    assert cli.main("record", [str(expert), "--out", str(tmp_path / "d")]) == 1
    assert "must be new or empty" in capsys.readouterr().err
    run_dir = tmp_path / "run"
    arguments = ["bc", "--data", str(tmp_path / "d"), "--frames", "1024", "--run-dir", str(run_dir)]
    assert cli.main("train", arguments) == 0
    assert "evaluation return" in capsys.readouterr().out
    config = from_json((run_dir / "config.json").read_text())
    assert (config.data, config.env.name) == (str(tmp_path / "d"), "CartPole-v1")
    assert from_json(to_json(config)) == config
    assert cli.main("eval", [str(run_dir), "--episodes", "1"]) == 0
    assert cli.main("train", ["bc"]) == 1
    assert "--data DATASET_DIR" in capsys.readouterr().err


def test_agents_that_do_not_learn_are_evaluated(tmp_path):
    rule, chance = (
        quiet(dataclasses.replace(preset(f"cartpole-{name}"), frames=300), tmp_path / name)
        for name in ("scripted", "random")
    )
    assert (rule.eval_return_mean, rule.eval_return_std) == (500.0, 0.0)
    assert 10 < chance.eval_return_mean < 40
    assert train.evaluate(tmp_path / "random", episodes=3).returns.max() < 200
    more = train.resume(tmp_path / "random", frames=600, stream=io.StringIO())
    assert more.env_frames >= 600


@pytest.mark.timeout(90)
def test_a_signal_leaves_no_partial_dataset(expert, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "rlstack", "record", str(expert), "--frames", "1000000000",
         "--out", str(tmp_path / "d")],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".partial-d-*")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, stderr
    assert "stopped by SIGTERM" in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_batch_may_be_larger_than_the_dataset(expert):
    experiment = resolve_dataset(
        cloning(
            expert,
            replay=ReplayConfig(sampler="uniform", batch_size=4096, unroll_length=1, max_size=4096),
        )
    )
    program = Offline(experiment)
    sample = program.windows.sample()
    assert len(sample.keys) == 4096
    assert np.bincount(sample.keys.astype(int)).min() >= 2
    assert program.learner.step(sample)["loss"] > 0
