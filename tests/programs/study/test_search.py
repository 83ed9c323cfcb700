"""A sweep's trials are trained, pruned, reported and gone on with; the trainer is a fake."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlstack.programs.config.encoding import from_json
from rlstack.programs.config.presets import preset
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.study import processes, report, study, train
from rlstack.programs.study.optuna import Database
from rlstack.programs.study.space import Range
from rlstack.programs.study.study import FailedTrialsError, SearchConfig, Study
from tests.programs.running import nothing_left
from tests.programs.study import fake_trainer
from tests.programs.tools.report.test_files import Page

pytest.importorskip("optuna")
pytestmark = pytest.mark.timeout(60)

RATE = "agent.optimizer.learning_rate"


def searched(seeds=(1,), trials=4, **changes):
    values = {RATE: Range(1e-5, 1e-1, log=True)}
    return Study(preset("cartpole-ppo"), seeds, values, SearchConfig(trials, **changes))


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Returns a function that makes a sweep whose trials behave in a given way."""
    monkeypatch.setattr(processes, "_MAIN", fake_trainer.MAIN)

    def made(behaviour=None, **changes):
        root = train.create(searched(**changes), tmp_path / "sweep")
        (root / "behaviour.json").write_text(json.dumps(behaviour or {}))
        return root

    return made


def go(root, **options):
    """Goes on with a sweep; returns its trials and its output."""
    out = io.StringIO()
    with nothing_left():
        rows = train.resume(root, stream=out, **options)
    return rows, out.getvalue()


@pytest.mark.slow
@pytest.mark.chosen
def test_the_best_trial_is_found_and_reported(begin):
    root = begin(seeds=(1, 2), trials=6)
    rows, text = go(root, jobs=2)
    assert [row.state for row in rows] == ["complete"] * 6
    best = max(rows, key=lambda row: row.value)
    assert f"trial {best.number}: return {best.value:.1f}" in text
    written = from_json((root / report.BEST).read_text())
    assert written.agent.optimizer.learning_rate == best.values[RATE]
    assert written.evaluator == preset("cartpole-ppo").evaluator
    table = (root / "report.md").read_text()
    assert f"The best is trial {best.number}, with return {best.value:.1f}." in table
    assert f"rlstack train {root / 'best.json'}" in text  # the files can be shared
    for name in ("report.md", "report.html"):
        found = (root / name).read_text()
        assert str(root.parent) not in found
        assert f"rlstack train {root.name}/best.json" in found
    assert f"--{RATE} {best.values[RATE]!r}" in table
    numbers = [int(n) for n in re.findall(r"^\| (\d+) \|", table, re.M)]
    ranked = sorted(rows, key=lambda row: -row.value)
    assert numbers == [row.number for row in ranked]
    page = Page((root / "report.html").read_text())
    assert page.open == []
    assert page.counts["circle"] == 6
    assert page.counts["svg"] == 3  # the best so far, the return by the rate, evaluations
    again, _ = go(root)
    assert again == rows  # it has all of its trials


def test_the_value_is_the_mean_over_the_seeds(begin):
    rows, _ = go(begin(seeds=(1, 5), trials=1))
    (row,) = rows
    score = 100.0 - 10.0 * abs(math.log10(row.values[RATE]) + 3)
    assert row.value == pytest.approx(score + 2)
    assert row.evaluations == pytest.approx({k: score * k / 3 for k in (1, 2, 3)})


@pytest.mark.slow
@pytest.mark.chosen
def test_a_failed_trial_is_reported_and_does_not_end_the_rest(begin):
    root = begin({"0": "fail", "2": "nan"})
    rows, text = go(root)
    assert [row.state for row in rows] == ["failed", "complete", "failed", "complete"]
    assert "trial 0: failed: exit code 1: ValueError: this trial | fails\n" in text
    assert "trial 2: failed: " in text
    assert "failed: exit code 1: ValueError: this trial / fails |" in (
        (root / "report.md").read_text()
    )
    assert len(study.find(root)) == 3  # what `rlstack report` shows; one left no result
    more, _ = go(root, trials=5)
    assert [row.state for row in more][4:] == ["complete"]


def test_a_sweep_without_a_complete_trial_is_an_error(begin):
    root = begin({"0": "fail"}, trials=1)
    with pytest.raises(FailedTrialsError, match="Trial 0: exit code 1: ValueError: this trial"):
        go(root)
    assert "1 trial: 1 failed." in (root / "report.md").read_text()


def test_values_that_do_not_fit_together_fail_their_trial(begin, monkeypatch):
    runs = Study.of_trial

    def refusing(self, values):
        if values[RATE] == first:
            raise ValueError("these values\ndo not fit")
        return runs(self, values)

    root = begin(trials=2)
    first = Database(searched(trials=2), root).ask().values[RATE]
    monkeypatch.setattr(Study, "of_trial", refusing)
    values = searched(trials=2)
    other = train.create(values, root.parent / "other")
    (other / "behaviour.json").write_text("{}")
    rows, text = go(other)
    assert [row.state for row in rows] == ["failed", "complete"]
    assert "trial 0: failed: these values do not fit" in text


@pytest.mark.slow
@pytest.mark.chosen
def test_a_pruned_trial_is_asked_to_end(begin, monkeypatch):
    recorded = Database.report

    def deciding(self, number, evaluation, mean):
        recorded(self, number, evaluation, mean)
        return number == 1

    monkeypatch.setattr(Database, "report", deciding)
    rows, text = go(begin({"1": "wait"}))
    assert [row.state for row in rows] == ["complete", "pruned", "complete", "complete"]
    assert rows[1].value == rows[1].evaluations[1]
    assert re.search(r"trial 1: pruned after evaluation 1, with return \d", text)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_interrupted_sweep_goes_on(begin):
    root = begin({"1": "wait"}, trials=3, prunes=False)
    timer = threading.Thread(target=lambda: (_wait_for_trial(root, 1), _interrupt()))
    timer.start()
    with nothing_left(), pytest.raises(Interrupted):
        train.resume(root, stream=io.StringIO())
    timer.join()
    rows, _ = go(root)
    _check_gone_on(root, rows)


KILLED = """
import json, sys
from rlstack.programs.study import processes, train
processes._MAIN = sys.argv[2]
train.resume(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.chosen
def test_a_killed_sweep_goes_on_where_it_was(begin):
    root = begin({"1": "wait"}, trials=3, prunes=False)
    command = [sys.executable, "-c", KILLED, str(root), fake_trainer.MAIN]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_for_trial(root, 1)
    finally:
        process.kill()
        process.wait()
    rows, _ = go(root)
    _check_gone_on(root, rows)


def _check_gone_on(root, rows):
    assert [row.state for row in rows] == ["complete", "interrupted", "complete", "complete"]
    assert rows[2].values == rows[1].values
    assert rows[2].name == rows[1].name == "trials/1"
    assert sorted(path.name for path in (root / "trials").iterdir()) == ["0", "1", "3"]


def _wait_for_trial(root, number):
    """Waits until a trial has been evaluated."""
    until = time.monotonic() + 40
    while not list((root / "trials").glob(f"{number}/*/metrics.jsonl")):
        assert time.monotonic() < until
        time.sleep(0.05)


def _interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_jobs_must_be_at_least_one(begin):
    with pytest.raises(ValueError, match="jobs must be at least 1; got 0"):
        train.resume(begin(), jobs=0)
