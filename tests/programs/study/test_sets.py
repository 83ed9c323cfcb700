"""Grids in other topologies: one after the other and in processes."""

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rlstack.programs.cli.commands import main
from rlstack.programs.config.encoding import to_json
from rlstack.programs.run import train as single
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study import executors, train
from rlstack.programs.study.executors import Work
from rlstack.programs.study.study import FailedTrialsError, Study
from rlstack.storage import checkpoint
from tests.fused.test_fused_run import ppo as fused
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
        with pytest.raises(FailedTrialsError, match=r"1 of 3(?s:.*)RuntimeError: the second"):
            train.run(Study(small(), (1, 2, 3)), root, stream=io.StringIO())
    assert "| 1: " in (root / "report.md").read_text()
    ended = train.resume(root, stream=io.StringIO())  # only the second trains
    assert [one.result.seed for one in ended] == [1, 2, 3]
    assert all((root / one.name / "metrics.jsonl").exists() for one in ended)
    text = (root / "report.md").read_text()
    assert all(f"{seed}: " in text for seed in (1, 2, 3))


RESULT = Result(1.0, 0.0, 2, 600, 2, 1.0, 600.0, 1, "single_process", "cartpole-ppo", "unknown")


def fake_training(patch):
    """Lets runs finish at once; returns the seeds of those that have trained."""
    seeds = []

    def finish(opened, *_):
        seeds.append(opened.experiment.seed)
        result = RESULT._replace(seed=seeds[-1])
        opened.directory.write_result(result._asdict())
        opened.directory.metrics.touch()
        return result

    patch.setattr(single, "train_opened", finish)
    return seeds


def test_a_run_that_cannot_be_opened_does_not_end_the_others(tmp_path, monkeypatch):
    seeds = fake_training(monkeypatch)
    root = train.create(Study(small(), (1, 2, 3, 4)), tmp_path / "set")
    for seed in (1, 2):
        (root / f"seed={seed}").mkdir()
    (root / "seed=1" / "config.json").write_text("{")
    (root / "seed=3").write_text("not a directory")
    command = f"--resume {root} tries them again"
    errors = r"seed=1: ValueError: (?s:.*)\nseed=2: RunLockedError: (?s:.*)\nseed=3: RunDirError: "
    failed = pytest.raises(FailedTrialsError, match=f"3 of 4 runs failed.*{command}.\n{errors}")
    with RunDir(root / "seed=2").claimed(), failed:
        train.resume(root, stream=io.StringIO())
    assert seeds == [4]


class Failed:
    """A process that has failed."""

    def poll(self):
        return 1


@pytest.mark.parametrize("options", [{}, {"jobs": 2, "launch": lambda *_: Failed()}])
def test_failed_runs_are_told_if_there_can_be_no_report(tmp_path, monkeypatch, options):
    fake_training(monkeypatch)
    root = train.create(Study(small(), (1, 2)), tmp_path / "set")
    train.resume(root, stream=io.StringIO())
    for seed in (1, 2):
        (root / f"seed={seed}" / "config.json").write_text("{")
        (root / "logs").mkdir(exist_ok=True)
        (root / "logs" / f"seed={seed}").write_text("it is damaged\n")
    out = io.StringIO()
    with pytest.raises(FailedTrialsError, match="2 of 2 runs failed"):
        train.resume(root, stream=out, **options)
    assert "there is no new report: ValueError: " in out.getvalue()


def test_an_error_of_one_program_does_not_end_the_others(tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(executors.vmapped, "train", failing)
    made = Study(fused(), (1, 2))
    found = list(executors.train(Work(made, tmp_path, io.StringIO()), made.trials(), {}))
    error = "RuntimeError: no memory"
    assert [(t.name, t.error) for t in found] == [("seed=1", error), ("seed=2", error)]


def test_a_set_that_was_interrupted_while_its_runs_are_made_can_be_resumed(tmp_path, monkeypatch):
    seeds, write = fake_training(monkeypatch), RunDir.write_config

    def interrupted(self, text):
        if self.path.name == "seed=2":
            raise KeyboardInterrupt
        write(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(RunDir, "write_config", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.run(Study(small(), (1, 2, 3)), tmp_path / "set", stream=io.StringIO())
    ended = train.resume(tmp_path / "set", stream=io.StringIO())
    assert len(ended) == 3 and seeds == [1, 2, 3]


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
            assert f"{name}: evaluation return" in shown
            config = json.loads((root / name / "config.json").read_text())
            assert config["agent"]["optimizer"]["learning_rate"] == float(rate)
            assert metrics(root / name)
            assert (root / "logs" / name).exists()
    assert main("report", [str(root), "--out", str(tmp_path / "r.md")]) == 0
    assert "cartpole-ppo learning_rate=0.003 |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(("of_study", "given"), [(200, {"frames": 200}), (100, {}), (50, {})])
def test_a_run_gets_the_budget_that_an_earlier_command_raised(
    tmp_path, monkeypatch, of_study, given
):
    found = {}

    def earlier(path, budgets, **_):
        found.update(budgets)
        return contextlib.nullcontext()

    monkeypatch.setattr("rlstack.programs.run.train.earlier_run", earlier)
    made = Study(dataclasses.replace(small(), frames=of_study), (1,))
    (tmp_path / "seed=1").mkdir()
    own = dataclasses.replace(made.base, frames=100)
    (tmp_path / "seed=1" / "config.json").write_text(to_json(own))
    work = Work(made, tmp_path, io.StringIO())
    with executors.open_run(work, made.trials()[0], {}):
        assert found == given


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_process_that_fails_is_reported(tmp_path):
    made = Study(small(), (1, 2))
    made.write(tmp_path)
    (tmp_path / "seed=2").mkdir()
    (tmp_path / "seed=2" / "config.json").write_text("{}")
    work = Work(made, tmp_path, io.StringIO(), jobs=2)
    found = {trial.name: trial.error for trial in executors.train(work, made.trials(), {})}
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
    command = [sys.executable, "-m", "rlstack", "train"]
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
