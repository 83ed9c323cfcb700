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
LEVEL = 0.95  # of all intervals
_POINTS = 60  # number of points of a learning curve
_LEVELS = 240  # number of points of a profile; profiles have steps, so they need more
FEW = 5  # runs of a task below which bootstrap intervals are far too narrow
_OVERSHOOT = 1.05  # ratio of frames up to which budgets are equal: batches go over a budget
RESAMPLES = 2_000  # bootstrap resamples for each point of a curve or profile


class Estimates(NamedTuple):
    """Statistics of a method, by their names."""

    method: str
    tasks: tuple[str, ...]
    runs: int
    values: Mapping[str, Interval]
    unfinished: int = 0  # runs of these tasks that have no result


class Comparison(NamedTuple):
    """The probability that a run of one method is better than one of another."""

    method: str
    other: str
    tasks: tuple[str, ...]
    runs: tuple[int, int]  # with a result
    probability: Interval
    notes: tuple[str, ...] = ()  # what makes the comparison less than it seems

    def __str__(self) -> str:
        """Returns a sentence that says so."""
        task = self.tasks[0] if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        estimate, low, high = self.probability
        notes = "".join(f"; {note}" for note in self.notes)
        if estimate in (0, 1):
            names, runs = (self.method, self.other), self.runs
            if not estimate:
                names, runs, low, high = names[::-1], runs[::-1], 1 - high, 1 - low
            few = "so few" if min(runs) < FEW else "these"
            each = "" if len(self.tasks) == 1 else " of the same task"
            return (
                f"each of the {runs[0]} runs of {names[0]} is better than each of the {runs[1]} "
                f"runs of {names[1]}{each} on {task}; {few} runs show only that the probability "
                f"of a better run is between {low:.2f} and {high:.2f}{notes}"
            )
        return (
            f"{self.method} is better than {self.other} on {task} with probability "
            f"{estimate:.2f} [{low:.2f}, {high:.2f}] ({self.runs[0]} and {self.runs[1]} runs"
            f"{notes})"
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
        _estimates(method, {task: runs}, [_returns(runs)], OF_ONE_TASK)
        for method in methods
        for task, runs in method.tasks.items()
    ]
    over_tasks = [
        _estimates(method, method.tasks, scores(method, normalisation), OVER_TASKS)
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
        intervals.interval(intervals.iqm, [task[:, point] for task in values], resamples=RESAMPLES)
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
        Curve(name, grid, intervals.band(profile, tasks, resamples=RESAMPLES))
        for name, tasks in known.items()
    ]


def _estimates(
    method: Method,
    tasks: Mapping[str, Sequence[Run]],
    values: intervals.Scores,
    statistics: Mapping[str, intervals.Statistic],
) -> Estimates:
    found = {name: intervals.interval(statistic, values) for name, statistic in statistics.items()}
    unfinished = sum(method.unfinished.get(task, 0) for task in tasks)
    return Estimates(method.name, tuple(tasks), sum(map(len, tasks.values())), found, unfinished)


def _compared(one: Method, other: Method) -> list[Comparison]:
    """Returns the comparison on each common task, and the one over all of them."""
    common = [task for task in one.tasks if task in other.tasks]
    wholes = [tuple(common)] if len(common) > 1 else []
    found = []
    for tasks in [*wholes, *((task,) for task in common)]:
        values = [[_returns(method.tasks[task]) for task in tasks] for method in (one, other)]
        first, second = (sum(map(len, scores)) for scores in values)
        probability = _probability(*values)
        notes = _notes((one, other), tasks)
        found.append(Comparison(one.name, other.name, tasks, (first, second), probability, notes))
    return found


def _probability(x: intervals.Scores, y: intervals.Scores) -> Interval:
    """Returns the probability of improvement with its interval.

    The bootstrap has no width where all pairs of runs have one outcome. The interval is then exact:
    K pairs of different runs, with K the smaller number of runs, are independent, and an outcome
    that all of them have is at least as probable as the K-th root of the tail (Clopper and Pearson,
    1934). Several tasks share the tail (Bonferroni).
    """
    found = intervals.interval(intervals.probability_of_improvement, x, y)
    if found.low < found.high:
        return found
    tail = (1 - LEVEL) / 2 / len(x)
    least = [tail ** (1 / min(len(a), len(b))) for a, b in zip(x, y, strict=True)]
    estimates = [
        float(intervals.probability_of_improvement([a], [b])) for a, b in zip(x, y, strict=True)
    ]
    low = np.mean([p * value for p, value in zip(least, estimates, strict=True)])
    rest = np.mean([1 - p for p in least])
    return Interval(found.estimate, float(low), float(low + rest))


def _notes(pair: tuple[Method, Method], tasks: Sequence[str]) -> tuple[str, ...]:
    unfinished = [sum(method.unfinished.get(task, 0) for task in tasks) for method in pair]
    notes = []
    if any(unfinished):
        notes.append(f"{unfinished[0]} and {unfinished[1]} more have no result")
    if any(unequal(task, pair) for task in tasks):
        low, high = (frames_of([r for t in tasks for r in m.tasks[t]]) for m in pair)
        notes.append(f"the budgets differ: {low} and {high} frames")
    return tuple(notes)


def unequal(task: str, methods: Sequence[Method]) -> bool:
    """Returns whether runs of a task have trained for different numbers of frames."""
    frames = [run.result.env_frames for m in methods for run in m.tasks.get(task, ())]
    return bool(frames) and max(frames) > _OVERSHOOT * min(frames)


def frames_of(runs: Sequence[Run]) -> str:
    """Returns the frames of runs, from the fewest to the most."""
    frames = sorted({run.result.env_frames for run in runs})
    ends = frames[:1] if frames[-1] <= _OVERSHOOT * frames[0] else [frames[0], frames[-1]]
    return " to ".join(f"{number:,}" for number in ends)


def _returns(runs: Sequence[Run]) -> np.ndarray:
    return np.array([run.result.eval_return_mean for run in runs])
