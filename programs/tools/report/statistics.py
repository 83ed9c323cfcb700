"""The numbers of a report, with their intervals; see `rlstack.math.intervals`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlstack.math import intervals
from rlstack.math.intervals import Band, Interval
from rlstack.programs.tools.charts import Curve
from rlstack.programs.tools.report.normalisation import Normalisation
from rlstack.programs.tools.report.runs import Method, Run

OF_ONE_TASK = {"mean": intervals.mean, "median": intervals.median, "IQM": intervals.iqm}
OVER_TASKS = {**OF_ONE_TASK, "optimality gap": intervals.optimality_gap}
_POINTS = 60  # number of points of a learning curve
_LEVELS = 240  # number of points of a profile; profiles have steps, so they need more
_RESAMPLES = 2_000  # bootstrap resamples for each point of a curve or profile


class Estimates(NamedTuple):
    """Statistics of a method, by their names."""

    method: str
    tasks: tuple[str, ...]
    runs: int
    values: Mapping[str, Interval]


class Comparison(NamedTuple):
    """The probability that a run of one method is better than one of another."""

    method: str
    other: str
    tasks: tuple[str, ...]
    runs: tuple[int, int]
    probability: Interval

    def __str__(self) -> str:
        """Returns a sentence that says so."""
        task = self.tasks[0] if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        estimate, low, high = self.probability
        return (
            f"{self.method} is better than {self.other} on {task} with probability "
            f"{estimate:.2f} [{low:.2f}, {high:.2f}] ({self.runs[0]} and {self.runs[1]} runs)"
        )


class Statistics(NamedTuple):
    """All numbers of a report."""

    methods: Sequence[Method]
    normalisation: Normalisation | None
    of_tasks: Sequence[Estimates]  # returns of each method on each task
    over_tasks: Sequence[Estimates]  # normalised scores; empty without a normalisation
    comparisons: Sequence[Comparison]

    @property
    def tasks(self) -> list[str]:
        """The tasks of all methods."""
        return sorted({task for method in self.methods for task in method.tasks})


def compute(
    methods: Sequence[Method], normalisation: Normalisation | None = None, compare: bool = False
) -> Statistics:
    """Returns the numbers of a report.

    Args:
      methods: the runs.
      normalisation: puts the scores of tasks on one scale; without it nothing is averaged over
        tasks.
      compare: True to compare each pair of methods on the tasks that both have.

    Raises:
      ValueError: the normalisation does not know a task, or methods to be compared have no task in
        common.
    """
    of_tasks = [
        _estimates(method.name, {task: runs}, [_returns(runs)], OF_ONE_TASK)
        for method in methods
        for task, runs in method.tasks.items()
    ]
    over_tasks = [
        _estimates(method.name, method.tasks, scores(method, normalisation), OVER_TASKS)
        for method in methods
        if normalisation is not None
    ]
    pairs = itertools.combinations(methods, 2) if compare else ()
    comparisons = [found for one, other in pairs for found in _compared(one, other)]
    if compare and not comparisons:
        shown = "; ".join(f"{method.name}: {', '.join(method.tasks)}" for method in methods)
        raise ValueError(
            f"--compare needs two methods with a task in common; got {shown}. Name the directories "
            "of both, or divide the runs in another way with --by."
        )
    return Statistics(methods, normalisation, of_tasks, over_tasks, comparisons)


def scores(method: Method, normalisation: Normalisation) -> list[np.ndarray]:
    """Returns the normalised scores of each task of a method."""
    return [normalisation(runs[0].environment, _returns(runs)) for runs in method.tasks.values()]


def learning_curve(
    name: str, tasks: Sequence[Sequence[Run]], normalisation: Normalisation | None = None
) -> Curve | None:
    """Returns the interquartile mean over runs at the same frames (sample efficiency).

    Args:
      name: name of the method.
      tasks: the runs of each task.
      normalisation: maps returns to scores, if runs of several tasks are averaged.

    Returns:
      The curve over the frames that all runs have; None if there are none.
    """
    tasks = [[run for run in runs if len(run.frames) > 1] for runs in tasks]
    if not tasks or not all(tasks):
        return None
    flat = [run for runs in tasks for run in runs]
    start, end = max(run.frames[0] for run in flat), min(run.frames[-1] for run in flat)
    if start >= end:
        return None
    grid = np.linspace(start, end, _POINTS)
    values = []
    for runs in tasks:
        curves = np.stack([np.interp(grid, run.frames, run.returns) for run in runs])
        values.append(normalisation(runs[0].environment, curves) if normalisation else curves)
    points = [
        intervals.interval(intervals.iqm, [task[:, point] for task in values], resamples=_RESAMPLES)
        for point in range(_POINTS)
    ]
    return Curve(name, grid, Band(*map(np.array, zip(*points, strict=True))))


def profiles(found: Statistics) -> list[Curve]:
    """Returns the fraction of runs above each normalised score, for each method."""
    if found.normalisation is None:
        return []
    known = {method.name: scores(method, found.normalisation) for method in found.methods}
    every = np.concatenate([task for tasks in known.values() for task in tasks])
    grid = np.linspace(min(0.0, every.min()), max(1.0, every.max()) * 1.02, _LEVELS)

    def profile(tasks: intervals.Scores) -> intervals.Array:
        return intervals.performance_profile(tasks, grid)

    return [
        Curve(name, grid, intervals.band(profile, tasks, resamples=_RESAMPLES))
        for name, tasks in known.items()
    ]


def _estimates(
    method: str,
    tasks: Mapping[str, Sequence[Run]],
    values: intervals.Scores,
    statistics: Mapping[str, intervals.Statistic],
) -> Estimates:
    found = {name: intervals.interval(statistic, values) for name, statistic in statistics.items()}
    return Estimates(method, tuple(tasks), sum(map(len, tasks.values())), found)


def _compared(one: Method, other: Method) -> list[Comparison]:
    """Returns the comparison on each common task, and the one over all of them."""
    common = [task for task in one.tasks if task in other.tasks]
    wholes = [tuple(common)] if len(common) > 1 else []
    found = []
    for tasks in [*wholes, *((task,) for task in common)]:
        values = [[_returns(method.tasks[task]) for task in tasks] for method in (one, other)]
        first, second = (sum(map(len, scores)) for scores in values)
        probability = intervals.interval(intervals.probability_of_improvement, *values)
        found.append(Comparison(one.name, other.name, tasks, (first, second), probability))
    return found


def _returns(runs: Sequence[Run]) -> np.ndarray:
    return np.array([run.result.eval_return_mean for run in runs])
