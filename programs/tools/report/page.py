"""A report as one HTML page, which needs no other file and no network.

Plots are SVG. A few lines of JavaScript in `page.html` show the numbers below the pointer and let
the legend hide curves; without JavaScript the plots and tables are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from rlstack.programs.tools.report import tables
from rlstack.programs.tools.report.plots import Bars, Lines, Plot, Points
from rlstack.programs.tools.report.tables import Table

_TEMPLATE = Path(__file__).with_name("page.html")
_COLORS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd",
    "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
# Size and margins of a plot, in pixels.
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _RIGHT = 620, 340, 12, 44, 16
_ROW, _LETTER = 28, 6.5  # height of a row of bars and width of a letter, in pixels


def html(
    title: str,
    intro: str,
    plots: Mapping[str, Plot | Points],
    sections: Sequence[tuple[str, Table]],
    remarks: Sequence[str] = (),
) -> str:
    """Returns the page.

    Args:
      title: title of the page.
      intro: a paragraph below the title.
      plots: the plots; the keys are not shown.
      sections: titles and tables below the plots.
      remarks: sentences above the plots.
    """
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(intro)}</p>"]
    if remarks:
        items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
        parts.append(f"<ul>{items}</ul>")
    figures = "\n".join(_figure(plot) for plot in plots.values())
    parts.append(f'<div class="plots">\n{figures}\n</div>')
    parts += [f"<h2>{escape(name)}</h2>{_table(table)}" for name, table in sections if table[1]]
    return Template(_TEMPLATE.read_text()).substitute(title=escape(title), body="\n".join(parts))


def _table(table: Table) -> str:
    columns, rows = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n" for cells in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _figure(plot: Plot | Points) -> str:
    caption = f"<figcaption>{escape(plot.title)}</figcaption>"
    if isinstance(plot, Bars):
        return f"<figure>{caption}{_bars(plot)}</figure>"
    if isinstance(plot, Points):
        return f"<figure>{caption}{_points_of(plot)}</figure>"
    return f"<figure data-plot>{caption}{_lines(plot)}</figure>"


def _lines(plot: Lines) -> str:
    x_ends = _ends([curve.x for curve in plot.curves])
    y_ends = _ends([end for curve in plot.curves for end in (curve.band.low, curve.band.high)])
    left = 62.0
    x = _scale(x_ends, left, _WIDTH - _RIGHT)
    y = _scale(y_ends, _HEIGHT - _BOTTOM, _TOP)
    groups = []
    for number, (_, frames, band) in enumerate(plot.curves):
        area = _points(x, y, [*frames, *frames[::-1]], [*band.low, *band.high[::-1]])
        line = _points(x, y, frames, band.estimate)
        color = _COLORS[number % len(_COLORS)]
        groups.append(
            f'<g data-curve="{number}"><polygon points="{area}" fill="{color}" '
            f'fill-opacity="0.18"/><polyline points="{line}" fill="none" stroke="{color}" '
            'stroke-width="2"/></g>'
        )
    cursor = f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    axes = _axis_x(plot.x, x_ends, x, _HEIGHT) + _axis_y(plot.y, y_ends, y, left)
    data = {
        "name": plot.x,
        "size": [_WIDTH, _HEIGHT],
        "left": left,
        "right": _WIDTH - _RIGHT,
        "x": x_ends,
        "curves": [
            {"name": name, "x": _rounded(frames), **{k: _rounded(v) for k, v in _items(band)}}
            for name, frames, band in plot.curves
        ],
    }
    # "</script" would end the element, and after "<!--" and "<script" its end would not.
    text = json.dumps(data).replace("<", "\\u003c")
    return (
        f"{_svg(plot.title, _HEIGHT, [axes, *groups, cursor])}{_legend(plot)}"
        f'<div class="tip" hidden></div><script type="application/json">{text}</script>'
    )


def _items(band: tuple[np.ndarray, ...]) -> list[tuple[str, np.ndarray]]:
    return list(zip(("estimate", "low", "high"), band, strict=True))


def _legend(plot: Lines) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true">'
        f'<span style="color:{_COLORS[number % len(_COLORS)]}">&#9632;</span> {escape(name)}'
        "</button>"
        for number, (name, _, _) in enumerate(plot.curves)
    )
    return f'<div class="legend">{buttons}</div>'


def _bars(plot: Bars) -> str:
    height = _TOP + _ROW * len(plot.rows) + _BOTTOM
    left = min(20 + _LETTER * max(len(name) for name, _ in plot.rows), _WIDTH * 0.55)
    lines = [] if plot.line is None else [plot.line]
    ends = _ends([np.array([*lines, *interval]) for _, interval in plot.rows])
    x = _scale(ends, left, _WIDTH - _RIGHT)
    parts = [_axis_x(plot.x, ends, x, height)]
    for at in lines:
        parts.append(
            f'<line class="reference" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" '
            f'y2="{height - _BOTTOM}"/>'
        )
    for number, (name, interval) in enumerate(plot.rows):
        estimate, low, high = interval
        y = _TOP + _ROW * (number + 0.5)
        color = _COLORS[number % len(_COLORS)]
        parts.append(
            f"<g><title>{escape(name)}: {tables.text_of(interval, 3)}</title>"
            f'<rect x="{x(low):.1f}" y="{y - 8:.1f}" width="{max(x(high) - x(low), 1):.1f}" '
            f'height="16" fill="{color}" fill-opacity="0.35"/><circle cx="{x(estimate):.1f}" '
            f'cy="{y:.1f}" r="4" fill="{color}"/></g><text x="{left - 8:.1f}" y="{y + 4:.1f}" '
            f'text-anchor="end">{escape(name)}</text>'
        )
    return _svg(plot.title, height, parts)


def _points_of(plot: Points) -> str:
    across = np.array([x for _, x, _ in plot.points], float)
    across = np.log10(across) if plot.log else across
    x_ends, y_ends = _ends([across]), _ends([np.array([y for _, _, y in plot.points])])
    left = 62.0
    x = _scale(x_ends, left + 6, _WIDTH - _RIGHT - 6)  # so that no point is cut off
    y = _scale(y_ends, _HEIGHT - _BOTTOM - 6, _TOP + 6)
    name = f"log10 of {plot.x}" if plot.log else plot.x
    parts = [_axis_x(name, x_ends, x, _HEIGHT), _axis_y(plot.y, y_ends, y, left)]
    for at, (label, _, value) in zip(across, plot.points, strict=True):
        parts.append(
            f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="4" fill="{_COLORS[0]}" '
            f'fill-opacity="0.6"><title>{escape(label)}, {escape(plot.y)} {_short(value)}</title>'
            "</circle>"
        )
    return _svg(plot.title, _HEIGHT, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">\n'
        f"{body}\n</svg>"
    )


def _axis_x(
    name: str, ends: tuple[float, float], x: Callable[[float], float], height: float
) -> str:
    bottom = height - _BOTTOM
    ticks = [
        f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{bottom}"/>'
        f'<text x="{x(at):.1f}" y="{bottom + 16}" text-anchor="middle">{_short(at)}</text>'
        for at in _ticks(ends)
    ]
    middle = (x(ends[0]) + x(ends[1])) / 2
    label = f'<text x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{escape(name)}</text>'
    return "".join(ticks) + label


def _axis_y(name: str, ends: tuple[float, float], y: Callable[[float], float], left: float) -> str:
    ticks = [
        f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>'
        f'<text x="{left - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{_short(at)}</text>'
        for at in _ticks(ends)
    ]
    middle = (y(ends[0]) + y(ends[1])) / 2
    label = (
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(name)}</text>"
    )
    return "".join(ticks) + label


def _ends(values: Sequence[np.ndarray]) -> tuple[float, float]:
    every = np.concatenate(values)
    low, high = float(every.min()), float(every.max())
    if low == high:
        return low - 0.5, high + 0.5
    return low, high


def _scale(ends: tuple[float, float], start: float, stop: float) -> Callable[[float], float]:
    low, high = ends
    return lambda value: start + (value - low) / (high - low) * (stop - start)


def _ticks(ends: tuple[float, float]) -> np.ndarray:
    """Returns up to seven round numbers between the ends."""
    low, high = ends
    power = 10.0 ** np.floor(np.log10((high - low) / 6))
    step = next(s * power for s in (1, 2, 5, 10) if (high - low) / (s * power) <= 6)
    return np.arange(np.ceil(low / step), np.floor(high / step + 1e-9) + 1) * step


def _short(value: float) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and sign != "k"):
            return f"{value / size:.4g}{sign}"
    return f"{value:.4g}"


def _points(
    x: Callable[[float], float],
    y: Callable[[float], float],
    xs: Sequence[float] | np.ndarray,
    ys: Sequence[float] | np.ndarray,
) -> str:
    return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
