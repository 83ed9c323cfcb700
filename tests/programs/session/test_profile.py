"""`--profile`: the shares of each node, traces, and one sentence on what limits the speed."""

import json
import subprocess
import sys
import time

import pytest

from rlstack.programs.run import train
from rlstack.programs.session.profile import Profile, Updates, bottleneck, summary
from rlstack.programs.session.run_dir import RunDir
from tests.programs import running

pytestmark = pytest.mark.timeout(120)


class Part:
    """Sleeps."""

    def step(self, seconds):
        time.sleep(seconds)
        return seconds


def test_it_counts_the_seconds_of_methods_between_two_updates(tmp_path):
    profile = Profile(Updates(2, 3), RunDir(tmp_path), "evaluator")
    part = Part()
    profile.time(part, step="steps", missing="nothing")
    drawn = iter([5.0, 5.25])
    profile.read("draws", lambda: next(drawn))
    for version in range(6):
        profile.observe(version)
        assert part.step(0.02) == 0.02
    found = json.loads((tmp_path / "profile" / "evaluator.json").read_text())
    assert found["updates"] == "2..3"
    # Updates 2 and 3 are made between versions 1 and 3.
    assert 0.04 <= found["parts"]["steps"] <= found["seconds"] < 0.5
    assert found["parts"]["draws"] == pytest.approx(0.25)


def test_evaluations_and_checkpoints_of_a_loop_are_not_other_time(tmp_path):
    class Loop:
        def evaluate(self):
            time.sleep(0.03)

        offer = save = evaluate

    loop, profile = Loop(), Profile(Updates(1, 1), RunDir(tmp_path), "evaluating")
    profile.time_engine(loop)
    profile.time_saving(loop, loop)
    profile.observe(0)
    loop.evaluate()
    loop.offer()
    loop.save()
    profile.close()
    found = json.loads((tmp_path / "profile" / "evaluating.json").read_text())
    assert 0.03 <= found["parts"]["evaluations"] <= found["seconds"] - 0.06
    assert 0.06 <= found["parts"]["writing checkpoints"] <= found["seconds"] - 0.03


def test_a_run_that_is_not_profiled_keeps_its_methods(tmp_path):
    profile, part = Profile(None, RunDir(tmp_path), "learner"), Part()
    profile.time(part, step="steps")
    profile.observe(1)
    profile.close()
    assert "step" not in vars(part) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["20", "20..30"])
def test_updates_are_read_and_written(text):
    assert Updates.parse(text) in (Updates(20, 20), Updates(20, 30))


@pytest.mark.parametrize("text", ["", "x", "30..20", "0..3", "1..", "-2"])
def test_other_texts_are_refused_before_anything_starts(text, tmp_path):
    with pytest.raises(ValueError, match=r"--profile must be .*20\.\.30"):
        Updates.parse(text)
    with pytest.raises(ValueError, match="--profile"):
        train.run(running.ppo("single_process"), tmp_path / "run", profile=text or "0")
    assert not (tmp_path / "run").exists()


def profiled(topology, run_dir, updates, *options):
    """Trains in a process of its own: the first trace of JAX imports TensorFlow if it is there."""
    command = ["cartpole-ppo", "--topology", topology, "--program.launch", "threads"]
    command += ["--program.num-actors", "1", "--program.num-inferencers", "1", "--frames", "12000"]
    command += ["--evaluator.episodes", "10", "--profile", updates, "--run-dir", str(run_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "rlstack", "train", *command, *options],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", "fused", "heavy_env", "light_env"])
def test_each_node_of_a_run_is_measured(topology, tmp_path):
    catch = ("--env.type", "jax", "--env.name", "rlstack.jax_envs.toy:Catch")
    options = catch if topology == "fused" else ()
    shown = profiled(topology, tmp_path / "run", "8..20", *options)
    folder = tmp_path / "run" / "profile"
    parts = {
        found["node"]: found["parts"]
        for found in (json.loads(path.read_text()) for path in folder.glob("*.json"))
    }
    expected = {
        "single_process": {"single_process"},
        "fused": {"fused"},
        "heavy_env": {"learner", "actor/0"},
        "light_env": {"learner", "actor/0", "inferencer/0"},
    }[topology]
    assert set(parts) == expected
    for node, shares in parts.items():
        assert min(shares.values()) >= 0
        assert f"{node}: " in shown
    learner = parts.get("learner") or parts[topology]
    assert learner["the compiled program" if topology == "fused" else "updates"] > 0
    assert list(folder.rglob("*.xplane.pb"))


def test_the_bottleneck_is_the_part_that_takes_most():
    shares = {"updates": 0.7, "waiting for environments": 0.2, "other": 0.1}
    assert "is updates, 70%" in bottleneck({"single_process": shares})
    text = bottleneck({"fused": {"evaluations": 0.9, "other": 0.1}})
    assert "is evaluations, 90%" in text and "--evaluator.period" in text
    nodes = {
        "learner": {"drawing batches": 0.8, "updates": 0.2},
        "actor/0": {"waiting for environments": 0.6, "computing actions": 0.4},
        "actor/1": {"waiting for environments": 0.5, "computing actions": 0.5},
    }
    text = bottleneck(nodes)
    assert "the learner waits 80%" in text and "on waiting for environments" in text


def test_a_run_that_ends_too_early_says_so(tmp_path):
    assert "ended before the first of the updates" in summary(RunDir(tmp_path))
