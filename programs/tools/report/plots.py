"""The plots of a report: as data, which `page` shows in HTML, and as pictures by matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstack.programs.tools.charts import COLORS, Bars, Curve, Lines, numbers_of
from rlstack.programs.tools.report.runs import Run
from rlstack.programs.tools.report.statistics import (
    FEW,
    OVER_TASKS,
    Statistics,
    learning_curve,
    profiles,
)

Plot = Lines | Bars
_Behind = tuple[int, np.ndarray, np.ndarray]  # the number of a method, frames and returns of a run
_MARKS = "os^DvP"  # of matplotlib, as `charts.MARKS`
_TITLE, _LABEL = 60, 30  # characters of a line: longer ones leave no space for the axes


def of_group(name: str, runs: Sequence[Run], found: Statistics) -> Lines:
    """Returns the learning curve of runs that differ in their seeds, with each run behind it.

    Its colour and mark are those of the method of the runs in all plots.
    """
    shown = [run for run in runs if len(run.frames) > 1]
    curve = learning_curve(name, [runs])
    title = f"{name}, {len(shown)} {'seed' if len(shown) == 1 else 'seeds'}"
    number = next(
        number
        for number, method in enumerate(found.methods)
        if any(run is runs[0] for runs_of in method.tasks.values() for run in runs_of)
    )
    curves = [(number, curve)] if curve else []
    return _curves(title, "episode return", curves, _behind(number, runs))


def of_statistics(found: Statistics) -> dict[str, Plot]:
    """Returns the plots of a report by the names of their files, in the order of its text."""
    plots: dict[str, Plot] = {}
    for statistic in OVER_TASKS if found.over_tasks else ():
        rows = [(one.method, one.values[statistic]) for one in found.over_tasks]
        title, x = f"{statistic} over tasks", "normalised score"
        plots[f"score, {statistic}"] = Bars(title, x, rows, numbers=range(len(rows)))
    if found.comparisons:
        rows = [
            (f"{c.method} > {c.other}, {_name(c.tasks)}", c.probability) for c in found.comparisons
        ]
        title = "Probability of improvement"
        plots["improvement"] = Bars(title, "probability", rows, line=0.5, numbers=None)
    if found.normalisation is not None:
        title = "Performance profile"
        curves = profiles(found)
        x, y = "normalised score", "share of runs"
        plots["profile"] = Lines(title, x, y, curves, range(len(curves)))
        if len(found.tasks) > 1:
            of_all = [
                (n, learning_curve(m.name, list(m.tasks.values()), found.normalisation))
                for n, m in enumerate(found.methods)
            ]
            plots["all tasks"] = _curves("Sample efficiency, all tasks", "normalised IQM", of_all)
    for task in found.tasks:
        methods = [(n, m, m.tasks[task]) for n, m in enumerate(found.methods) if task in m.tasks]
        of_task = [(n, learning_curve(m.name, [runs])) for n, m, runs in methods]
        few = [run for n, _, runs in methods if len(runs) < FEW for run in _behind(n, runs)]
        title = f"Sample efficiency, {task}"
        plots[f"task {task}"] = _curves(title, "IQM of returns", of_task, few)
    return {name: plot for name, plot in plots.items() if isinstance(plot, Bars) or plot.curves}


def _curves(
    title: str, y: str, curves: Sequence[tuple[int, Curve | None]], runs: Sequence[_Behind] = ()
) -> Lines:
    """Returns plots of curves with the numbers of their methods, where there are any."""
    found = {number: curve for number, curve in curves if curve is not None}
    return Lines(title, "frames", y, list(found.values()), list(found), runs)


def _behind(number: int, runs: Sequence[Run]) -> list[_Behind]:
    """Returns single runs, for a plot of the curve of their method."""
    finite = [(run, np.isfinite(run.returns)) for run in runs]
    return [(number, r.frames[ok], r.returns[ok]) for r, ok in finite if np.count_nonzero(ok) > 1]


def _name(tasks: Sequence[str]) -> str:
    return tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"


def draw(plot: Plot, path: Path) -> None:
    """Draws a plot to a file. The suffix of the file, .png or .svg, is the format.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "matplotlib, which draws the pictures, is not installed. Install the extra: "
            "pip install 'rlstack[report]'; or draw none: --pictures none"
        ) from error
    height, names = 3.2, [textwrap.fill(plot.title, _TITLE)]
    if isinstance(plot, Bars):
        rows = [(textwrap.fill(name, _LABEL), interval) for name, interval in plot.rows]
        plot = plot._replace(rows=rows)
        height = 1 + 0.3 * len(rows)
        names += [name for name, _ in rows]
    height += 0.2 * "".join(names).count("\n")
    with matplotlib.rc_context({"svg.hashsalt": "rlstack"}):  # the same file for the same numbers
        figure = Figure(figsize=(5, height), layout="constrained")
        axes = figure.subplots()
        _lines(axes, plot) if isinstance(plot, Lines) else _bars(axes, plot)
        axes.set(title=names[0], xlabel=plot.x)
        axes.grid(alpha=0.3)
        none: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=100, metadata=none)


def _lines(axes: Any, plot: Lines) -> None:
    for method, x, y in plot.runs:
        axes.plot(x, y, linewidth=0.7, alpha=0.5, color=_color(method))
    for number, (name, x, band) in zip(numbers_of(plot), plot.curves, strict=True):
        look: dict[str, Any] = {"color": _color(number), "marker": _mark(number)}
        axes.plot(x, band.estimate, linewidth=2, label=name, markevery=0.2, markersize=5, **look)
        axes.fill_between(x, band.low, band.high, alpha=0.2, color=_color(number), linewidth=0)
    axes.set(ylabel=plot.y)
    if len(plot.curves) > 1:
        axes.legend(fontsize="small")


def _bars(axes: Any, plot: Bars) -> None:
    for row, (number, (_, interval)) in enumerate(zip(numbers_of(plot), plot.rows, strict=True)):
        estimate, low, high = interval
        axes.plot([low, high], [row, row], linewidth=6, alpha=0.35, color=_color(number))
        axes.plot(estimate, row, _mark(number), markersize=6, color=_color(number))
    if plot.line is not None:
        axes.axvline(plot.line, color="gray", linewidth=1)
    axes.set_yticks(range(len(plot.rows)), [name for name, _ in plot.rows])
    axes.invert_yaxis()


def _color(number: int) -> str:
    return "gray" if number < 0 else COLORS[number % len(COLORS)]


def _mark(number: int) -> str:
    return _MARKS[max(0, number) % len(_MARKS)]
