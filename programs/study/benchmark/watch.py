"""Whether a change slows learning: runs of small tasks against bands that were recorded before.

The area under a learning curve is the mean of the returns of training over the frames of the run.
A defect that slows learning lowers it, also where all runs reach the same return in the end. A band
has the areas of earlier runs; single runs differ, so the mean over the seeds of a task is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rlstack.checks import ReportedError
from rlstack.programs.study.benchmark.records import Record, Scored
from rlstack.programs.study.benchmark.suites import Band, Suite


class OutsideError(ReportedError):
    """Runs are outside of their bands; the message names the tasks."""


class Found(NamedTuple):
    """What the runs of a task reached, and its band."""

    name: str
    area: float  # mean over the runs
    final: float  # mean greedy return at the end
    band: Band

    @property
    def is_within(self) -> bool:
        """Whether both numbers are within the band."""
        low, high = self.band.area
        return low <= self.area <= high and self.final >= self.band.final

    def __str__(self) -> str:
        """Returns the numbers and their bands in one line."""
        low, high = self.band.area
        return (
            f"{self.name}: area {self.area:,.4g} (band {low:,.4g} to {high:,.4g}), greedy return "
            f"{self.final:,.4g} (at least {self.band.final:,.4g})"
        )


def area(run: Scored, frames: int) -> float:
    """Returns the mean return over the frames of a run, from its learning curve.

    A point of the curve has the mean of the episodes since the point before. So the area does not
    depend on where the points are; in a compiled program this depends on the load of the machine.

    Args:
      run: a run with returns of training.
      frames: the budget of the run. The last point counts to its end.
    """
    ends = np.minimum(np.array(run.frames), frames)
    ends[-1] = frames
    widths = np.diff(ends, prepend=0.0)
    return float(np.sum(widths * np.array(run.returns)) / frames)


def compare(suite: Suite, records: Sequence[Record]) -> list[Found]:
    """Returns what the runs of each task with a band reached."""
    found = []
    for record in records:
        for task in suite.tasks:
            made = record.tasks.get(task.name)
            if task.band is None or made is None or not made.runs:
                continue
            areas = [area(run, made.experiment.frames) for run in made.runs]
            finals = [run.result.eval_return_mean for run in made.runs]
            name = task.name if len(records) == 1 else f"{record.agent}, {task.name}"
            found.append(Found(name, float(np.mean(areas)), float(np.mean(finals)), task.band))
    return found


def check(suite: Suite, record: Record) -> None:
    """Checks the runs of a suite against its bands.

    Raises:
      OutsideError: the mean over the runs of a task is outside of its band.
    """
    if bad := [str(one) for one in compare(suite, [record]) if not one.is_within]:
        raise OutsideError(
            f"{len(bad)} of {len(record.tasks)} tasks are outside of their bands, so the last "
            "changes may slow learning. Look for the commit with git bisect. If a change is meant "
            f"to do so, record new bands in suites/{suite.name}.json.\n" + "\n".join(bad)
        )
