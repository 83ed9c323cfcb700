"""Compiled functions are kept for later commands, in a bounded folder that only the user writes."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from rlstack.programs.program.launch import compiled
from rlstack.storage import jsonl

ROOT = Path(__file__).resolve().parents[3]
_VARIABLES = (compiled._FOLDER, *compiled._EVERYTHING)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home of the user without a cache; the variables of this process are as they were after."""
    before = dict(os.environ)
    for name in (*_VARIABLES, compiled.OWN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def kept(home):
    """Returns the folder that `keep` chooses."""
    compiled.keep()
    folder = Path(os.environ[compiled._FOLDER])
    assert home in folder.parents
    return folder


def entry(folder, name, data, seconds_ago=3600.0):
    path = folder / f"{name}-cache"
    path.write_bytes(data)
    then = path.stat().st_mtime - seconds_ago
    os.utime(path, (then, then))
    return path


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(240)
def test_a_second_command_compiles_nothing_and_learns_the_same(home, tmp_path):
    def run():
        directory = tmp_path / f"run{len(runs)}"
        options = ["--frames", "1000", "--log-period", "200", "--run-dir", str(directory)]
        done = subprocess.run(
            [sys.executable, "-m", "rlstack", "train", "cartpole-ppo", *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        (folder,) = (home / "rlstack" / "compiled").iterdir()
        runs.append({path.name: path.stat().st_mtime_ns for path in folder.glob("*-cache")})
        losses.append(
            [
                line["learner/loss"]
                for line in jsonl.read(directory / "metrics.jsonl")
                if "learner/loss" in line
            ]
        )

    runs, losses = [], []
    run()
    run()
    assert runs[0] and runs[1] == runs[0]
    assert losses[0] and losses[1] == losses[0]


@pytest.mark.parametrize(("words", "looks"), [(["presets"], False), (["eval", "none"], True)])
def test_only_commands_that_compile_look_at_the_folder(home, words, looks):
    subprocess.run(
        [sys.executable, "-m", "rlstack", *words], cwd=ROOT, capture_output=True, timeout=60
    )
    assert (home / "rlstack").exists() == looks


def test_the_folder_is_for_the_user_alone(home):
    folder = kept(home)
    assert folder.stat().st_mode & 0o777 == 0o700
    del os.environ[compiled._FOLDER]
    folder.chmod(0o770)
    compiled.keep()
    assert compiled._FOLDER not in os.environ


def test_the_user_chooses_another_folder_or_none(home, monkeypatch, tmp_path):
    monkeypatch.setenv(compiled.OWN, "")
    compiled.keep()
    assert compiled._FOLDER not in os.environ
    monkeypatch.setenv(compiled.OWN, str(tmp_path / "own"))
    compiled.keep()
    assert os.environ[compiled._FOLDER] == str(tmp_path / "own")
    monkeypatch.setenv(compiled._FOLDER, "of JAX")
    compiled.keep()
    assert os.environ[compiled._FOLDER] == "of JAX"


def test_without_a_place_nothing_is_kept(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    compiled.keep()
    assert compiled._FOLDER not in os.environ


def test_what_was_not_written_completely_is_removed(home):
    folder = kept(home)
    whole = zlib.compress(os.urandom(1000))
    good = entry(folder, "good", whole)
    torn = [entry(folder, f"torn{size}", whole[:size]) for size in (0, 10, len(whole) - 1)]
    now = entry(folder, "being-written", whole[:10], seconds_ago=0)
    (folder / "tidied").unlink()
    compiled._tidy(folder)
    assert good.exists() and now.exists()
    assert not any(path.exists() for path in torn)
    later = now.stat().st_mtime - 100
    os.utime(now, (later, later))
    os.utime(folder / "tidied", (later, later))
    compiled._tidy(folder)
    assert good.exists() and not now.exists()


def test_the_oldest_are_removed_when_there_is_too_much(home, monkeypatch):
    folder = kept(home)
    data = zlib.compress(os.urandom(1000))
    paths = [entry(folder, str(age), data, seconds_ago=age) for age in (1000, 3000, 2000)]
    monkeypatch.setattr(compiled, "_MOST", 2 * len(data))
    compiled._tidy(folder)
    assert [path.exists() for path in paths] == [True, False, True]


def test_nodes_of_a_program_use_the_folder_that_is_there(home):
    with compiled.shared() as variables:
        own = Path(variables[compiled._FOLDER])
        assert own.exists() and home not in own.parents
    assert not own.exists()
    kept(home)
    with compiled.shared() as variables:
        assert variables == {}
