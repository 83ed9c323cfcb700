"""Whole runs in one process: files, evaluation, resuming, faults and signals."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from rlstack.acting.actor import transition_spec
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.learning.learner import NonFiniteError
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.build.replay import announce_replay
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.run.single_process import SingleProcessRun


def small(name="cartpole-ppo", **changes):
    experiment = preset(name)
    return dataclasses.replace(
        experiment,
        frames=changes.pop("frames", 1500),
        log_period=500,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        **changes,
    )


def leaves_equal(a, b):
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_writes_its_config_logs_checkpoint_and_result(tmp_path):
    experiment = small()
    stream = io.StringIO()
    result = train.run(experiment, tmp_path / "run", stream=stream)
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found == result._asdict()
    assert {
        "eval_return_mean", "eval_return_std", "eval_episodes", "env_frames", "learner_steps",
        "wall_seconds", "frames_per_second", "seed", "topology", "git_commit",
        "eval_return_by_opponent",
    } <= set(found)  # fmt: skip
    assert found["env_frames"] >= 1500
    assert found["eval_episodes"] == 2
    assert from_json((tmp_path / "run" / "config.json").read_text()) == experiment
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    *training, judged = lines
    assert [x["env_frames"] for x in training] == sorted({x["env_frames"] for x in training})
    assert judged["env_frames"] == result.env_frames == training[-1]["env_frames"]
    assert judged["evaluator/episode_return"] == result.eval_return_mean
    assert any("learner/loss" in line and "actor/episode_return" in line for line in lines)
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    assert "frames" in stream.getvalue()


@pytest.mark.parametrize(("frames", "says"), [(30, True), (400, False)])
def test_a_run_that_is_too_short_to_learn_says_so(tmp_path, frames, says):
    stream = io.StringIO()
    result = train.run(small(frames=frames), tmp_path / "run", stream=stream)
    assert (result.learner_steps == 0) == says
    assert ("no update was made in" in stream.getvalue()) == says


def test_evaluating_a_run_gives_the_return_of_its_params(tmp_path):
    result = train.run(small(), tmp_path / "run", stream=io.StringIO())
    again = train.evaluate(tmp_path / "run")
    assert again.returns.mean() == result.eval_return_mean
    assert len(train.evaluate(tmp_path / "run", episodes=3, seed=5).returns) == 3


@pytest.mark.slow
@pytest.mark.chosen
def test_the_same_seed_gives_the_same_params_whatever_the_number_of_threads():
    def params(num_workers):
        experiment = small(frames=14_000)  # at least 50 updates
        experiment = dataclasses.replace(
            experiment,
            agent=dataclasses.replace(experiment.agent, num_epochs=2),
            env=dataclasses.replace(experiment.env, num_workers=num_workers),
        )
        program = SingleProcessRun(experiment)
        try:
            for _ in range(55 * experiment.replay.unroll_length):
                program.player.actor.step()
                while program.player.replay.can_sample():
                    program.learner.step(program.player.replay.sample())
            assert program.learner.version >= 50
            return jax.device_get(program.learner.save())
        finally:
            program.close()

    one = params(1)
    assert leaves_equal(one, params(1))
    assert leaves_equal(one, params(2))


_LATER = [pytest.mark.slow, pytest.mark.chosen]


@pytest.mark.parametrize(
    ("name", "env_type", "options"),
    [
        ("cartpole-ppo", "cpp", {}),
        pytest.param("cartpole-ppo", "for_loop", {}, marks=_LATER),
        pytest.param("cartpole-dqn", "cpp", {}, marks=_LATER),
        pytest.param("cartpole-dqn", "cpp", {"norm": "batch", "dropout": 0.2}, marks=_LATER),
        pytest.param("cartpole-ppo", "cpp", {"norm": "batch_renorm"}, marks=pytest.mark.slow),
        pytest.param("cartpole-ppg", "cpp", {}, marks=_LATER),  # its memory is resumed too
        pytest.param("cartpole-vmpo", "cpp", {}, marks=pytest.mark.slow),
        pytest.param("cartpole-mpo", "cpp", {}, marks=pytest.mark.slow),
        pytest.param("pendulum-crossq", "cpp", {}, marks=_LATER),
        pytest.param("pendulum-simba", "cpp", {}, marks=pytest.mark.slow),
        pytest.param("deepsea-rnd", "jax", {}, marks=_LATER),  # the bonus too
        pytest.param("toll-ppo-lagrangian", "jax", {}, marks=_LATER),  # the multiplier too
        pytest.param("catch-muzero", "jax", {}, marks=_LATER),
        pytest.param("pendulum-tdmpc2", "cpp", {}, marks=_LATER),
        pytest.param("twostep-qmix", "jax", {}, marks=_LATER),
        pytest.param("cover-maddpg", "jax", {}, marks=_LATER),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name, env_type, options):
    """Both runs restart their environments in the middle; see restart_environments."""
    experiment = small(name)
    agent = experiment.agent
    if env_type == "for_loop":  # each component has an optimizer of another kind
        agent = dataclasses.replace(
            agent,
            torso_optimizer=OptimizerConfig("lion", 1e-3, 500, schedule="cosine"),
            policy_head_optimizer=OptimizerConfig("schedule_free_adamw", 1e-2, warmup_steps=20),
            value_head_optimizer=OptimizerConfig("sgd", 1e-2, arguments={"momentum": 0.9}),
        )
    experiment = dataclasses.replace(
        experiment,
        agent=agent,
        env=dataclasses.replace(experiment.env, type=env_type),
        network=dataclasses.replace(experiment.network, **options),
    )

    def steps(program, count):
        for _ in range(count):
            program.player.actor.step()
            while program.player.replay.can_sample():
                program.learner.step(program.player.replay.sample())

    # An unroll boundary: the first update comes after 33 steps, then one every 32 steps.
    half = 32 * 10 + 1
    unbroken = SingleProcessRun(experiment)
    broken = SingleProcessRun(experiment)
    resumed = SingleProcessRun(experiment)
    try:
        steps(unbroken, half)
        unbroken.restart_environments()
        steps(unbroken, half)

        steps(broken, half)
        train.checkpoint.save(tmp_path, broken.env_frames, broken.save(), {})
        path = train.checkpoint.latest(tmp_path)
        resumed.load(train.checkpoint.restore(path, resumed.template()))
        assert resumed.env_frames == broken.env_frames
        steps(resumed, half)

        assert unbroken.learner.version == resumed.learner.version > 5
        assert leaves_equal(unbroken.learner.save(), resumed.learner.save())
        assert unbroken.env_frames == resumed.env_frames
    finally:
        for program in (unbroken, broken, resumed):
            program.close()


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_resumes_to_a_new_budget(tmp_path):
    first = train.run(small(), tmp_path / "run", stream=io.StringIO())
    second = train.resume(tmp_path / "run", frames=3000, stream=io.StringIO())
    assert second.env_frames >= 3000 > first.env_frames
    assert second.learner_steps > first.learner_steps
    config = from_json((tmp_path / "run" / "config.json").read_text())
    assert config.frames == 3000


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        train.resume(tmp_path)


def test_a_nan_stops_the_run_and_leaves_a_dump_that_runs_again(tmp_path):
    experiment = small()
    experiment = dataclasses.replace(
        experiment,
        normalisation=NormalisationConfig(reward_scale=float("inf")),
    )
    with pytest.raises(NonFiniteError, match="rlstack rerun") as caught:
        train.run(experiment, tmp_path / "run", stream=io.StringIO())
    dump = str(caught.value).split("rlstack rerun ")[1]
    assert dump.startswith(str(tmp_path / "run"))
    logs = train.rerun(dump)
    assert not np.isfinite(logs["loss"])


def test_a_users_environment_that_violates_its_spec_is_named(tmp_path):
    experiment = small(
        env=EnvConfig("tests.programs.broken_env:WrongShape", num_envs=2),
        replay=dataclasses.replace(preset("cartpole-ppo").replay, batch_size=2),
    )
    with pytest.raises(ValueError, match="WrongShape"):
        train.run(experiment, tmp_path / "run", stream=io.StringIO())


def test_an_unwritable_run_directory_is_refused_at_once(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises((ValueError, OSError), match=str(blocked)):
        train.run(small(), blocked / "run", stream=io.StringIO())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=_LATER)]
)
def test_a_signal_saves_and_ends_with_its_exit_code(tmp_path, number, code):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "rlstack", "train", "cartpole-ppo", "--frames", "100000000",
         "--log-period", "1000", "--run-dir", str(run_dir), "--env.type", "process",
         "--env.num-workers", "2"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        metrics = run_dir / "metrics.jsonl"
        while not (metrics.exists() and "learner/loss" in metrics.read_text()):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, "no update within a minute"
            time.sleep(0.1)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    assert "everything is saved" in stderr
    assert train.checkpoint.latest(run_dir / "checkpoints") is not None
    assert not (run_dir / "result.json").exists()
    assert members_of_session(process.pid) == []


def test_a_run_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    train.run(small(frames=600), tmp_path / "run", stream=io.StringIO())
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert left == []


def members_of_session(session):
    """Returns the processes of a session, from /proc, without zombies."""
    members = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                state, _, _, its_session = file.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            members.append(int(pid))
    return members


@pytest.mark.slow
@pytest.mark.chosen
def test_the_config_of_a_run_can_be_run_again_as_it_is(tmp_path):
    experiment = small(frames=600)
    first = train.run(experiment, tmp_path / "a", stream=io.StringIO())
    again = from_json((tmp_path / "a" / "config.json").read_text())
    second = train.run(again, tmp_path / "b", stream=io.StringIO())
    assert second.eval_return_mean == first.eval_return_mean
    assert to_json(again) == to_json(experiment)


@pytest.mark.parametrize("topology", ["single_process", "heavy_env"])
def test_a_replay_that_does_not_fit_is_refused_before_anything_starts(tmp_path, topology):
    base = preset("cartpole-dqn")
    replay = dataclasses.replace(base.replay, max_size=10**13)
    experiment = dataclasses.replace(base, replay=replay, topology=topology)
    with pytest.raises(ValueError, match="must fit into what is free of"):
        train.run(experiment, tmp_path / "run", stream=io.StringIO())


@pytest.mark.slow
@pytest.mark.chosen
def test_the_size_of_the_replay_is_printed(tmp_path):
    experiment, stream = preset("breakout-dqn"), io.StringIO()
    with make_env(dataclasses.replace(experiment.env, num_envs=1), seed=0) as env:
        spec = transition_spec(make_agent(experiment, env.spec), env.spec)
    announce_replay(experiment, spec, stream)
    said = int(stream.getvalue().split()[1].replace(",", ""))
    assert 84 * 84 < said / experiment.replay.max_size < 1.1 * 84 * 84  # batches included

    stream = io.StringIO()
    train.run(small(), tmp_path / "run", stream=stream)
    assert stream.getvalue().startswith("replay: ")
