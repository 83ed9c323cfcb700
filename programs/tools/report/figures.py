"""Plots as pictures, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlstack.programs.tools.report.plots import Bars, Lines, Plot


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
    for run in plot.runs:
        axes.plot(run.frames, run.returns, linewidth=0.7, alpha=0.5, color="tab:blue")
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
