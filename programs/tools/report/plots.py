"""The plots of a report as plain data, which `figures` draws as pictures and `page` in HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlstack.math.intervals import Interval
from rlstack.programs.tools.report.runs import Run
from rlstack.programs.tools.report.statistics import (
    OVER_TASKS,
    Curve,
    Statistics,
    learning_curve,
    profiles,
)


class Lines(NamedTuple):
    """Curves with bands."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    runs: Sequence[Run] = ()  # single runs behind the curve


class Bars(NamedTuple):
    """Estimates with intervals, one in each row."""

    title: str
    x: str
    rows: Sequence[tuple[str, Interval]]
    line: float | None = None  # where the rows would be without any difference


class Points(NamedTuple):
    """Points with names; a page shows them, and no picture."""

    title: str
    x: str
    y: str
    points: Sequence[tuple[str, float, float]]
    log: bool = False  # whether each factor of ten of x has the same width


Plot = Lines | Bars


def of_group(name: str, runs: Sequence[Run]) -> Lines:
    """Returns the learning curve of runs that differ in their seeds, with each run behind it."""
    shown = [run for run in runs if len(run.frames) > 1]
    curve = learning_curve(name, [runs])
    title = f"{name}, {len(shown)} {'seed' if len(shown) == 1 else 'seeds'}"
    return Lines(title, "frames", "episode return", [curve] if curve else [], shown)


def of_statistics(found: Statistics) -> dict[str, Plot]:
    """Returns the plots of a report by the names of their files, in the order of its text."""
    plots: dict[str, Plot] = {}
    for statistic in OVER_TASKS if found.over_tasks else ():
        rows = [(one.method, one.values[statistic]) for one in found.over_tasks]
        plots[f"score, {statistic}"] = Bars(f"{statistic} over tasks", "normalised score", rows)
    if found.comparisons:
        rows = [
            (f"{c.method} > {c.other}, {_name(c.tasks)}", c.probability) for c in found.comparisons
        ]
        title = "Probability of improvement"
        plots["improvement"] = Bars(title, "probability", rows, line=0.5)
    if found.normalisation is not None:
        title = "Performance profile"
        plots["profile"] = Lines(title, "normalised score", "share of runs", profiles(found))
        if len(found.tasks) > 1:
            curves = [
                learning_curve(method.name, list(method.tasks.values()), found.normalisation)
                for method in found.methods
            ]
            plots["all tasks"] = _curves("Sample efficiency, all tasks", "normalised IQM", curves)
    for task in found.tasks:
        methods = [method for method in found.methods if task in method.tasks]
        curves = [learning_curve(method.name, [method.tasks[task]]) for method in methods]
        plots[f"task {task}"] = _curves(f"Sample efficiency, {task}", "IQM of returns", curves)
    return {name: plot for name, plot in plots.items() if isinstance(plot, Bars) or plot.curves}


def _curves(title: str, y: str, curves: Sequence[Curve | None]) -> Lines:
    return Lines(title, "frames", y, [curve for curve in curves if curve is not None])


def _name(tasks: Sequence[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
