"""The commit recorded in a result."""

import subprocess

import numpy as np
import pytest

from rlstack.acting.evaluator import Evaluation
from rlstack.programs.config.presets import preset
from rlstack.programs.session import result
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir


def _git(root, *args):
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    command = ["git", "-C", str(root), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.timeout(60)
def test_the_commit_is_marked_dirty_or_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert result._commit_of(tmp_path) == "unknown"
    _git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-qm", "first")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert result._commit_of(tmp_path) == commit
    (tmp_path / "a").write_text("2")
    assert result._commit_of(tmp_path) == f"{commit}-dirty"
    # Installed in the checkout of another project, whose commit does not describe this source.
    (tmp_path / "site-packages").mkdir()
    assert result._commit_of(tmp_path / "site-packages") == "unknown"
    monkeypatch.setenv("PATH", "")
    assert result._commit_of(tmp_path) == "unknown"
    assert result.git_commit() == "unknown"


def test_a_commit_is_unknown_after_an_unforeseen_error(monkeypatch):
    def run(*_, **__):
        raise MemoryError

    monkeypatch.setattr(subprocess, "run", run)
    result.commit_at_start.cache_clear()
    assert result.commit_at_start().result(10) == "unknown"
    result.commit_at_start.cache_clear()


def test_a_result_names_the_commit_at_the_start_of_the_run(monkeypatch):
    result.commit_at_start.cache_clear()
    monkeypatch.setattr(result, "git_commit", lambda: "first")
    experiment = preset("cartpole-ppo")
    actions = PeriodicActions(experiment, [].append, evaluate=list.append, checkpoint=list.append)
    assert result.commit_at_start().result(10) == "first"
    monkeypatch.setattr(result, "git_commit", lambda: "second")
    evaluation = Evaluation(np.ones(1), np.ones(1, int))
    assert actions.result(evaluation, 10, 1).git_commit == "first"
    result.commit_at_start.cache_clear()


def test_numbers_that_are_not_finite_are_numbers_again(tmp_path):
    directory = RunDir.create(tmp_path / "run", "", 1)
    nan = float("nan")
    diverged = Result(nan, nan, 10, 1000, 10, 1.0, 1000.0, 1, "single_process", "", "abcdef0")
    directory.write_result(diverged._asdict())
    found = read_result(directory)
    assert np.isnan(found.eval_return_mean) and np.isnan(found.eval_return_std)
    directory.write_result({**diverged._asdict(), "eval_return_mean": "high"})
    assert read_result(directory) is None
