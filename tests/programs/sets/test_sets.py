"""Sets of runs in other topologies: one after the other and in processes."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from programs.cli.commands import main
from programs.run import train as single
from programs.sets import processes, train
from programs.sets.members import FailedRunsError, RunSet
from rlstack.storage import checkpoint
from tests.programs.running import metrics, nothing_left, ppo

RATE = "agent.optimizer.learning_rate"


def small(**changes):
    return dataclasses.replace(
        ppo("single_process", frames=600), loggers=("jsonl",), checkpoint_period=300, **changes
    )


@pytest.mark.slow
@pytest.mark.chosen
def test_runs_go_one_after_the_other_and_a_failed_one_does_not_end_the_set(tmp_path, monkeypatch):
    trained = single.train_opened

    def failing(opened, stream=None):
        if opened.experiment.seed == 2:
            raise RuntimeError("the second fails")
        return trained(opened, stream)

    root = tmp_path / "set"
    with monkeypatch.context() as patch:
        patch.setattr(single, "train_opened", failing)
        with pytest.raises(FailedRunsError, match=r"1 of 3(?s:.*)RuntimeError: the second"):
            train.run(RunSet(small(), (1, 2, 3)), root, stream=io.StringIO())
    assert "| 1: " in (root / "report.md").read_text()
    ended = train.resume(root, stream=io.StringIO())  # only the second trains
    assert [one.result.seed for one in ended] == [1, 2, 3]
    assert all((one.path / "metrics.jsonl").exists() for one in ended)
    text = (root / "report.md").read_text()
    assert all(f"{seed}: " in text for seed in (1, 2, 3))


@pytest.mark.one_lane
def test_a_directory_that_is_not_empty_and_bad_options_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    at = ["--run-dir", str(tmp_path)]
    assert main("train", ["cartpole-ppo", "--seeds", "1", "2", *at]) == 1
    assert "must be new or empty" in capsys.readouterr().err
    at = ["--run-dir", str(tmp_path / "set")]
    assert main("train", ["cartpole-ppo", "--vary", "agent.discont", "0.9", "0.99", *at]) == 1
    assert "did you mean" in capsys.readouterr().err
    assert not (tmp_path / "set").exists()
    assert main("train", ["cartpole-ppo", "--jobs", "2"]) == 2
    assert "--jobs needs --seeds or --vary" in capsys.readouterr().err


def small_args(root):
    return [
        "cartpole-ppo",
        *("--frames", "600", "--agent.num-epochs", "2", "--log-period", "200"),
        *("--evaluator.episodes", "2", "--evaluator.num-envs", "2", "--loggers", "jsonl"),
        *("--seeds", "1", "2", "--vary", RATE, "1e-3", "3e-3", "--run-dir", str(root)),
    ]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
def test_runs_are_processes_with_jobs(tmp_path, capsys):
    root = tmp_path / "set"
    with nothing_left():
        assert main("train", [*small_args(root), "--jobs", "2"]) == 0
    shown = capsys.readouterr().err
    for rate in ("0.001", "0.003"):
        for seed in (1, 2):
            name = f"learning_rate={rate},seed={seed}"
            assert f"{name}: greedy return" in shown
            config = json.loads((root / name / "config.json").read_text())
            assert config["agent"]["optimizer"]["learning_rate"] == float(rate)
            assert metrics(root / name)
            assert (root / "logs" / name).exists()
    assert main("report", [str(root), "--out", str(tmp_path / "r.md")]) == 0
    assert "cartpole-ppo learning_rate=0.003 |" in (tmp_path / "r.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_that_fails_is_reported(tmp_path):
    RunSet(small(), (1, 2)).write(tmp_path)
    (tmp_path / "seed=2").mkdir()
    (tmp_path / "seed=2" / "config.json").write_text("{}")
    found = dict(processes.run(tmp_path, ["seed=1", "seed=2"], {}, 2, io.StringIO()))
    assert found["seed=1"] == ""
    assert found["seed=2"].startswith("exit code 1: ")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_an_interrupted_set_of_processes_saves_and_goes_on(tmp_path):
    """Also after the command was killed, which takes its processes with it."""
    root = tmp_path / "set"
    args = [*small_args(root), "--jobs", "2"]
    args[args.index("--frames") + 1] = "10000000"
    args += ["--checkpoint-period", "1000"]
    command = [sys.executable, "-m", "programs", "train"]
    for number in (signal.SIGINT, signal.SIGKILL):
        with nothing_left():
            process = subprocess.Popen([*command, *args], stderr=subprocess.DEVNULL)
            until = time.monotonic() + 60
            begun = frames(root)
            while min(frames(root)[:2], default=0) <= max(begun, default=0):
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.2)
            os.kill(process.pid, number)
            process.wait(30)
        args = ["--resume", str(root), "--jobs", "2"]
    newest = frames(root)
    assert (
        main("train", ["--resume", str(root), "--frames", str(max(newest) + 500), "--jobs", "2"])
        == 0
    )
    for path in root.glob("*seed=*"):
        assert json.loads((path / "result.json").read_text())["env_frames"] >= max(newest) + 500


def frames(root):
    """The frames of the newest checkpoints of the runs that have one, most first."""
    paths = [checkpoint.latest(path / "checkpoints") for path in root.glob("*seed=*")]
    return sorted((int(path.name[5:]) for path in paths if path is not None), reverse=True)
