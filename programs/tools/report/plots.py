"""The plots of a report: as data, which `page` shows in HTML, and as pictures by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstack.programs.tools.charts import Bars, Curve, Lines
from rlstack.programs.tools.report.runs import Run
from rlstack.programs.tools.report.statistics import (
    OVER_TASKS,
    Statistics,
    learning_curve,
    profiles,
)

Plot = Lines | Bars


def of_group(name: str, runs: Sequence[Run]) -> Lines:
    """Returns the learning curve of runs that differ in their seeds, with each run behind it."""
    shown = [run for run in runs if len(run.frames) > 1]
    curve = learning_curve(name, [runs])
    title = f"{name}, {len(shown)} {'seed' if len(shown) == 1 else 'seeds'}"
    behind = [(run.frames, run.returns) for run in shown]
    return Lines(title, "frames", "episode return", [curve] if curve else [], behind)


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
    height = 3.2 if isinstance(plot, Lines) else 1 + 0.3 * len(plot.rows)
    with matplotlib.rc_context({"svg.hashsalt": "rlstack"}):  # the same file for the same numbers
        figure = Figure(figsize=(5, height), layout="constrained")
        axes = figure.subplots()
        _lines(axes, plot) if isinstance(plot, Lines) else _bars(axes, plot)
        axes.set(title=plot.title, xlabel=plot.x)
        axes.grid(alpha=0.3)
        none: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=100, metadata=none)


def _lines(axes: Any, plot: Lines) -> None:
    for x, y in plot.runs:
        axes.plot(x, y, linewidth=0.7, alpha=0.5, color="tab:blue")
    for number, (name, x, band) in enumerate(plot.curves):
        axes.plot(x, band.estimate, linewidth=2, color=f"C{number}", label=name)
        axes.fill_between(x, band.low, band.high, alpha=0.2, color=f"C{number}", linewidth=0)
    axes.set(ylabel=plot.y)
    if len(plot.curves) > 1:
        axes.legend(fontsize="small")


def _bars(axes: Any, plot: Bars) -> None:
    for number, (_, (estimate, low, high)) in enumerate(plot.rows):
        axes.plot([low, high], [number, number], linewidth=6, alpha=0.35, color=f"C{number}")
        axes.plot(estimate, number, "o", markersize=6, color=f"C{number}")
    if plot.line is not None:
        axes.axvline(plot.line, color="gray", linewidth=1)
    axes.set_yticks(range(len(plot.rows)), [name for name, _ in plot.rows])
    axes.invert_yaxis()
