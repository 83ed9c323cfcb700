"""Run directories: new names, early errors, atomic files."""

import json
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from rlstack.programs.session import run_dir
from rlstack.programs.session.run_dir import RunDir, RunDirError
from rlstack.storage import checkpoint


def test_a_fresh_directory_is_named_after_preset_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = RunDir.create(None, "cartpole-ppo", 1)
    assert made.path.parent == tmp_path / "runs"
    assert re.fullmatch(r"cartpole-ppo-s1-\d{8}-\d{6}", made.path.name)
    assert list(made.path.iterdir()) == []


@pytest.mark.timeout(30)
def test_runs_that_start_in_the_same_second_get_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir.time, "strftime", lambda _: "20260102-030405")
    found = []

    def create():
        found.append(RunDir.create(None, "p", 0, root=tmp_path).path)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(found)) == 8
    assert tmp_path / "p-s0-20260102-030405-8" in found


def test_a_chosen_directory_is_taken_new_or_empty(tmp_path):
    assert RunDir.create(tmp_path / "a" / "b", "p", 0).path == tmp_path / "a" / "b"
    assert RunDir.create(str(tmp_path / "a" / "b"), "p", 0).path.is_dir()


def test_a_directory_that_holds_a_run_is_refused_with_two_suggestions(tmp_path):
    RunDir.create(tmp_path, "p", 0).write_config("{}")
    with pytest.raises(RunDirError, match=r"holds a run already.*--resume .*--run-dir"):
        RunDir.create(tmp_path, "p", 0)


def test_a_directory_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirError, match=r"it holds thesis\.tex.*--run-dir"):
        RunDir.create(tmp_path, "p", 0)


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"file/run must be .*Not a directory.*--run-dir"):
        RunDir.create(tmp_path / "file" / "run", "p", 0)
    with pytest.raises(RunDirError, match=r"must be a directory that can be written.*--run-dir"):
        RunDir.create(None, "p", 0, root=tmp_path / "file")

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir.tempfile, "TemporaryFile", full)
    with pytest.raises(RunDirError, match="No space left"):
        RunDir.create(tmp_path / "new", "p", 0)


def test_open_needs_a_run(tmp_path):
    with pytest.raises(RunDirError, match="no such directory"):
        RunDir.open(tmp_path / "missing")
    with pytest.raises(RunDirError, match=r"no config\.json"):
        RunDir.open(tmp_path)
    RunDir(tmp_path).write_config('{"seed": 1}\n')
    found = RunDir.open(tmp_path)
    assert json.loads(found.config.read_text()) == {"seed": 1}
    names = [found.metrics, found.tensorboard, found.checkpoints, found.result]
    assert [p.name for p in names] == ["metrics.jsonl", "tensorboard", "checkpoints", "result.json"]


def test_only_a_directory_without_results_is_cleared(tmp_path):
    run = RunDir.create(tmp_path / "run", "x", 1)
    run.write_config("{}")
    run.metrics.touch()
    run.tensorboard.mkdir()
    (other := run.path / "mine.txt").touch()
    run.clear_unused()
    assert run.config.exists()
    other.unlink()
    run.metrics.write_text("{}")
    run.clear_unused()
    assert run.config.exists()
    run.metrics.write_text("")
    run.clear_unused()
    assert list(run.path.iterdir()) == []


def test_dumps_do_not_overwrite_each_other(tmp_path):
    here = RunDir(tmp_path)
    assert [here.dump(7).name for _ in range(3)] == ["dump-7", "dump-7.1", "dump-7.2"]
    assert all(path.is_dir() for path in tmp_path.iterdir())


def test_results_are_json_and_written_atomically(tmp_path, monkeypatch):
    here = RunDir(tmp_path)
    here.write_result({"eval_return_mean": np.float32(475.5), "std": float("nan"), "n": 20})
    want = {"eval_return_mean": 475.5, "std": "nan", "n": 20}
    assert json.loads(here.result.read_text()) == want

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        here.write_result({"n": 21})
    with pytest.raises(TypeError):
        here.write_result({"n": object()})
    assert json.loads(here.result.read_text()) == want
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.timeout(60)
def test_importing_run_dir_and_display_loads_neither_jax_nor_rich():
    code = (
        "import io, sys, rlstack.programs.session.run_dir, rlstack.programs.session.display\n"
        "shown = rlstack.programs.session.display.ProgressDisplay(10, io.StringIO())\n"
        "shown.write(1, {}); shown.close()\n"
        "sys.exit(str({'jax', 'rich', 'numpy'} & set(sys.modules)) if "
        "{'jax', 'rich', 'numpy'} & set(sys.modules) else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=50, capture_output=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr


def test_a_name_under_which_nothing_can_be_saved_is_refused_at_the_start(tmp_path):
    named = tmp_path / os.fsdecode(b"caf\xe9")
    long = tmp_path.joinpath(*["x" * 200] * 20)
    for path, why in ((named, r"caf\\xe9 .*UTF-8"), (long, r"has 4\d\d\d bytes, .* at most 3695")):
        with pytest.raises(RunDirError, match=why):
            RunDir.create(path, "p", 0)
        with pytest.raises(RunDirError, match=why):
            RunDir(path).check_free()
    assert list(tmp_path.iterdir()) == []
    named.mkdir()
    (named / "config.json").write_text("{}")
    with pytest.raises(RunDirError, match="UTF-8"), RunDir.open(named).claimed():
        pass


def test_under_the_longest_name_a_checkpoint_can_be_saved(tmp_path):
    path = tmp_path.joinpath(*["x" * 200] * 17)
    path = path / ("y" * (3695 - len(str(path)) - 1))
    assert len(str(path)) == 3695
    made = RunDir.create(path, "p", 0)
    saved = checkpoint.save(made.checkpoints, 10**11, {"w": np.arange(3.0)}, {})
    np.testing.assert_array_equal(checkpoint.restore(saved, {"w": np.zeros(3)})["w"], [0, 1, 2])
