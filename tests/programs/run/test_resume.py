"""Resumed runs: nothing that was reached is lost, counted twice or overwritten."""

import dataclasses
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.cli.commands import main
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.run_lock import RunLockedError
from rlstack.storage import checkpoint, checkpoint_record, jsonl
from tests.fused import test_fused_run as fused


def small(**changes):
    return dataclasses.replace(
        preset("cartpole-ppo"),
        **{"frames": 1500, "log_period": 250, "checkpoint_period": 500, **changes},
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run; tests use copies."""
    path = tmp_path_factory.mktemp("runs") / "run"
    train.run(small(), path, stream=io.StringIO())
    return path


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def resume(path, **options):
    return train.resume(path, stream=io.StringIO(), **options)


def frames_logged(path, of="learner/steps"):
    """The frames of the lines of metrics that hold a name."""
    return [line["env_frames"] for line in jsonl.read(path / "metrics.jsonl") if of in line]


def each_frame_once(path):
    """Whether each frame has one line of training, and one of evaluation."""
    logged = [frames_logged(path), frames_logged(path, of="evaluator/episode_return")]
    assert all(logged)
    return all(frames == sorted(set(frames)) for frames in logged)


def files(path):
    return {f.relative_to(path): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def flip(path):
    """Changes one byte of the largest file of a checkpoint."""
    file = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("frames", [None, 1000])
def test_resuming_a_finished_run_changes_nothing(run_dir, caplog, frames):
    before = files(run_dir)
    result = resume(run_dir, frames=frames)
    assert result._asdict() == json.loads(
        before[next(p for p in before if p.name == "result.json")]
    )
    assert result.wall_seconds > 0.01
    after = files(run_dir)
    assert {p: b for p, b in after.items() if p.name != ".lock"} == {
        p: b for p, b in before.items() if p.name != ".lock"
    }
    assert "has finished" in caplog.text


@pytest.mark.slow
@pytest.mark.chosen
def test_seconds_add_up_over_the_commands_of_a_run(run_dir):
    first = json.loads((run_dir / "result.json").read_text())
    started = time.monotonic()
    second = resume(run_dir, frames=3000)
    took = time.monotonic() - started
    assert first["wall_seconds"] < second.wall_seconds < first["wall_seconds"] + took
    assert second.env_frames >= 3000
    assert second.frames_per_second == pytest.approx(second.env_frames / second.wall_seconds)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["single_process", "fused"])
def test_seconds_begin_when_the_parts_are_made_and_compiled(tmp_path, monkeypatch, topology):
    make = train._make_engine

    def slowly(*arguments):
        time.sleep(3.0)  # as compiling a large loop
        return make(*arguments)

    monkeypatch.setattr(train, "_make_engine", slowly)
    experiment = small() if topology == "single_process" else fused.ppo(updates=3)
    path = tmp_path / "run"
    result = train.run(experiment, path, stream=io.StringIO())
    assert result.wall_seconds > 3.0
    timed = checkpoint.read_metadata(checkpoint.latest(path / "checkpoints"))["train_seconds"]
    assert 3.0 < timed <= result.wall_seconds  # so hours of a resumed run count it too


@pytest.mark.slow
@pytest.mark.chosen
def test_an_interrupted_resume_keeps_the_result(run_dir, monkeypatch):
    before = (run_dir / "result.json").read_bytes()

    def full(*_, **__):
        raise checkpoint.CheckpointWriteError("no space")

    monkeypatch.setattr(train.checkpoint, "save", full)
    with pytest.raises(checkpoint.CheckpointWriteError):
        resume(run_dir, frames=3000)
    assert (run_dir / "result.json").read_bytes() == before


def test_a_run_killed_after_its_checkpoint_logs_each_frame_once(run_dir, caplog):
    """As SIGKILL leaves it: metrics that are newer than the newest checkpoint."""
    paths = checkpoint.paths(run_dir / "checkpoints")
    for path in paths[:-1]:
        shutil.rmtree(path)
    (run_dir / "result.json").unlink()
    kept = checkpoint.read_metadata(paths[-1])["env_frames"]
    before = frames_logged(run_dir)
    lost = [frames for frames in before if frames > kept]
    assert lost
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(b'{"env_frames": 17')  # the line that the kill tore
    resume(run_dir)
    after = frames_logged(run_dir)
    assert each_frame_once(run_dir)
    assert [frames for frames in after if frames <= kept] == [f for f in before if f <= kept]
    abandoned = jsonl.read(run_dir / "metrics.abandoned.jsonl")
    trained = [line["env_frames"] for line in abandoned if "learner/steps" in line]
    assert trained == lost
    assert f"after frame {kept}" in caplog.text


def test_a_damaged_newest_checkpoint_is_passed_over(run_dir, caplog):
    newest, older, _ = checkpoint.paths(run_dir / "checkpoints")
    record = newest / "checkpoint.json"
    record.write_text(record.read_text().replace("env_frames", "env_framer"))
    with caplog.at_level(logging.WARNING):
        train.evaluate(run_dir, episodes=1)
    assert f"{newest} is damaged" in caplog.text
    assert newest.exists()  # readers change nothing
    caplog.clear()
    result = resume(run_dir, frames=3000)
    assert f"{newest} is damaged" in caplog.text
    assert f"using {older}" in caplog.text
    assert result.env_frames >= 3000
    assert (run_dir / "checkpoints" / f"damaged_{newest.name}").exists()
    checkpoint.verify(checkpoint.latest(run_dir / "checkpoints"))
    assert each_frame_once(run_dir)


def test_a_run_without_an_undamaged_checkpoint_is_an_error_that_names_it(run_dir):
    paths = checkpoint.paths(run_dir / "checkpoints")
    for path in paths:
        flip(path)
    with pytest.raises(checkpoint.DamagedError, match=paths[0].name):
        resume(run_dir, frames=3000)
    assert checkpoint.paths(run_dir / "checkpoints") == paths  # nothing is set aside


def test_two_commands_do_not_share_a_run_directory(run_dir):
    with RunDir(run_dir).claimed(), pytest.raises(RunLockedError, match=f"process {os.getpid()} "):
        resume(run_dir, frames=3000)
    new = run_dir.parent / "new"
    new.mkdir()
    with RunDir(new).claimed(), pytest.raises(RunLockedError, match="only one command"):
        train.run(small(), new, stream=io.StringIO())


@pytest.mark.slow
@pytest.mark.chosen
def test_a_checkpoint_that_says_no_time_is_resumed(run_dir):
    path = checkpoint.latest(run_dir / "checkpoints")
    frames = checkpoint.read_metadata(path)["env_frames"]
    record = json.loads((path / "checkpoint.json").read_text())
    leaves = [leaf[:5] for leaf in record["leaves"]]
    old = {"format": 1, "step": record["step"], "leaves": leaves}
    (path / "checkpoint.json").write_text(json.dumps(old | {"metadata": {"env_frames": frames}}))
    result = resume(run_dir, frames=3000)
    timed = result.env_frames - frames
    assert result.frames_per_second == pytest.approx(timed / result.wall_seconds)


def test_a_report_reads_metrics_after_a_full_disk(run_dir, caplog):
    pytest.importorskip("matplotlib")
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([lines[0], lines[1][:20] + lines[2], *lines[3:]]))
    out = run_dir.parent / "results.md"
    assert main("report", [str(run_dir), "--out", str(out)]) == 0
    assert "| cartpole-ppo |" in out.read_text()
    assert "line 2 is incomplete" in caplog.text


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(150)
def test_of_two_resumes_at_once_one_is_refused(run_dir):
    shutil.copy(run_dir / "result.json", run_dir.parent / "result.json")
    command = [sys.executable, "-m", "rlstack", "train", "--resume", str(run_dir)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([*command, "--frames", "100000000"], **pipes)
    try:
        until = time.monotonic() + 60
        while f'"pid": {first.pid}' not in (run_dir / ".lock").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        second = subprocess.run([*command, "--frames", "2000"], timeout=60, **pipes)
        assert second.returncode == 1
        assert f"process {first.pid} on host" in second.stderr
        assert "Traceback" not in second.stderr
        frames = json.loads((run_dir / "config.json").read_text())["frames"]
        assert frames in (1500, 100_000_000)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=20)
        third = subprocess.run([*command, "--frames", "2000"], timeout=60, **pipes)
        assert third.returncode == 0, third.stderr
    finally:
        first.kill()
        first.communicate(timeout=20)
    assert json.loads((run_dir / "result.json").read_text())["env_frames"] >= 2000


def edit(run_dir, **changes):
    """Writes these options, by section and name, into the config of a run."""
    config = json.loads((run_dir / "config.json").read_text())
    for name, value in changes.items():
        section, _, option = name.partition("__")
        if option:
            config[section][option] = value
        else:
            config[section] = value
    (run_dir / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"env__num_envs": 4}, r"env\.num_envs was 8 and is 4"),
        ({"network__hidden_sizes": [8]}, r"network\.hidden_sizes was \[64, 64\] and is \[8\]"),
        ({"replay__max_size": 999}, r"replay\.max_size was \d+ and is 999"),
    ],
)
def test_a_config_whose_sizes_were_edited_is_refused_with_file_and_option(run_dir, changes, told):
    edit(run_dir, **changes)
    with pytest.raises(checkpoint.CheckpointError, match=told) as caught:
        resume(run_dir, frames=2000)
    path = checkpoint.latest(run_dir / "checkpoints")
    assert str(path) in str(caught.value) and "config.json" in str(caught.value)
    assert "Put these back" in str(caught.value)


def test_checkpoints_with_exchanged_names_are_refused(run_dir):
    newest, older = checkpoint.paths(run_dir / "checkpoints")[:2]
    names = newest.name, older.name
    aside = newest.rename(newest.with_name("aside"))
    older.rename(newest)
    aside.rename(older)
    with pytest.raises(checkpoint.CheckpointError, match="name of its step") as caught:
        resume(run_dir, frames=2000)
    assert all(name in str(caught.value) for name in names)


def test_a_checkpoint_of_another_seed_or_run_is_refused(run_dir):
    edit(run_dir, seed=7)
    for use in (lambda: resume(run_dir, frames=2000), lambda: train.evaluate(run_dir)):
        with pytest.raises(checkpoint.CheckpointError, match=r"seed 1, .* config\.json is 7"):
            use()
    edit(run_dir, seed=1)
    metadata = checkpoint.read_metadata(checkpoint.latest(run_dir / "checkpoints"))
    foreign = {**metadata, "run": {**metadata["run"], "id": "another"}}
    path = checkpoint.save(run_dir / "checkpoints", 1900, {"learner": np.zeros(1)}, foreign)
    with pytest.raises(checkpoint.CheckpointError, match=f"{path.name} and .* are of two"):
        resume(run_dir, frames=2000)


def test_all_checkpoints_of_a_run_have_its_id_and_those_without_one_are_taken(run_dir):
    def ids(directory):
        paths = checkpoint.paths(directory / "checkpoints")
        return {checkpoint.read_metadata(path).get("run", {}).get("id") for path in paths}

    (first,) = ids(run_dir)
    moved = run_dir.rename(run_dir.with_name("moved"))
    resume(moved, frames=2000)
    assert ids(moved) == {first} and len(first) == 32
    for path in checkpoint.paths(moved / "checkpoints"):  # as an earlier version wrote them
        text = json.loads((path / "checkpoint.json").read_text())
        del text["metadata"]["run"]
        leaves = checkpoint_record.leaves_of(text).values()
        text = checkpoint_record.encode(text["step"], list(leaves), text["metadata"])
        (path / "checkpoint.json").write_text(text)
    assert resume(moved, frames=2500).env_frames >= 2500
