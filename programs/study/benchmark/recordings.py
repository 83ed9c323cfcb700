"""Trains the runs that a suite's datasets come from, and records the datasets."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rlstack.programs.run import record, train
from rlstack.programs.session.display import lasting
from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study.benchmark.suites import Suite, Task
from rlstack.programs.tools.report.normalisation import Range
from rlstack.storage.datasets import Dataset

_RUN, _SETS = "run", "sets"


def folder_of(root: Path) -> Path:
    """Returns where a suite's recordings are, given the directory of an agent's studies."""
    return root.with_name("recordings")


def path_of(task: Task, folder: Path) -> Path:
    """Returns the directory of a task's dataset below a folder of recordings."""
    name, _, kind = task.recorded.partition("/")
    return folder / name / _SETS / kind


def missing(suite: Suite, tasks: Sequence[Task], folder: Path) -> list[str]:
    """Returns the names of the recordings of some tasks that are not in a folder."""
    names = dict.fromkeys(task.recorded.partition("/")[0] for task in tasks if task.recorded)
    unknown = [name for name in names if name not in suite.recordings]
    assert not unknown, f"the suite {suite.name} has no recording {unknown}"
    return [name for name in names if not (folder / name / _SETS).is_dir()]


def make(suite: Suite, names: Sequence[str], folder: Path, stream: TextIO | None = None) -> None:
    """Trains the runs of recordings, or continues them, and plays their datasets.

    Args:
      suite: the suite.
      names: those of recordings that are not there.
      folder: where each gets a directory with its run and its sets.
      stream: receives the progress; standard error by default.

    Raises:
      rlstack.programs.session.signals.Interrupted: SIGINT or SIGTERM was received; the same call
        continues.
    """

    def tell(line: str) -> None:
        print(f"{name}: {line}", file=lasting(stream), flush=True)

    for name in names:
        run, sets = folder / name / _RUN, folder / name / _SETS
        if not RunDir(run).config.exists():
            train.run(suite.recorded_experiment(name), run, stream=stream)
        elif read_result(RunDir(run)) is None:
            train.resume(run, stream=stream)
        # A set that an interrupted command left must not look like all four.
        begun = sets.with_name(f"{_SETS}-unfinished")
        shutil.rmtree(begun, ignore_errors=True)
        record.record_sets(run, begun, frames=suite.recordings[name].frames, tell=tell)
        begun.rename(sets)


def range_of(task: Task, folder: Path) -> Range | None:
    """Returns the mean returns of a recording's random and expert sets; None without recording."""
    if not task.recorded:
        return None
    sets = path_of(task, folder).parent
    worst, best = (Dataset(sets / kind).header.return_mean for kind in ("random", "expert"))
    return worst, best
