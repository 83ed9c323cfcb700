"""Charts as HTML, for pages that need no network: those of reports and of ``rlstack dashboard``.

A chart is a figure with SVG. The style and the script of `HEAD`, once in a page, show the numbers
below the pointer and let the legend hide curves; without JavaScript the charts are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstack.math.intervals import Band, Interval

HEAD = Path(__file__).with_name("charts.html").read_text(encoding="utf-8")
COLORS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd",
    "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
# Curves and rows of a method have its colour and its mark: 30 pairs before one is used again.
MARKS = "●■▲◆▼✚"
_SHAPES = (
    "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
    "m-4 -4h8v8h-8z",
    "m0 -5l5 9h-10z",
    "m0 -5l5 5l-5 5l-5 -5z",
    "m0 5l5 -9h-10z",
    "m-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
)
_MARKED = 6  # marks of a curve
# Size and margins of a chart, in pixels.
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _RIGHT = 620, 340, 12, 44, 16
_LEFT = 62.0
# Of a picture by itself; in a page these are in `HEAD`.
_STYLE = (
    "svg{font:12px sans-serif;color:#222}text{fill:currentColor}.cursor{visibility:hidden}"
    ".grid,.reference{stroke:currentColor;stroke-opacity:.15}"
)
_ROW, _LETTER = 28, 6.5  # height of a row of bars and width of a letter, in pixels


class Curve(NamedTuple):
    """Numbers of a method or run at points of an axis, such as frames or thresholds, ``[K]``."""

    name: str
    x: np.ndarray
    band: Band


class Lines(NamedTuple):
    """Curves with bands."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    numbers: Sequence[int] = ()  # of the method of each curve: its colour and mark; none: in order
    runs: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()  # number of the method, x, y
    log: bool = False  # whether each factor of ten of y has the same height; y must be positive


class Bars(NamedTuple):
    """Estimates with intervals, one in each row."""

    title: str
    x: str
    rows: Sequence[tuple[str, Interval]]
    line: float | None = None  # where the rows would be without any difference
    numbers: Sequence[int] | None = ()  # as of `Lines`; None if the rows are of no single method


class Points(NamedTuple):
    """Points with names; a page shows them, and no picture."""

    title: str
    x: str
    y: str
    points: Sequence[tuple[str, float, float]]
    log: bool = False  # whether each factor of ten of x has the same width


class Radar(NamedTuple):
    """Numbers from 0 to 1 of methods, on axes that leave one point in all directions."""

    title: str
    axes: Sequence[str]
    shapes: Sequence[tuple[str, Sequence[float]]]  # name of the method, and a number for each axis
    numbers: Sequence[int] = ()  # as of `Lines`


Drawn = Lines | Bars | Radar  # charts that a picture shows


def figure(chart: Drawn | Points) -> str:
    """Returns a chart as an HTML element, with a legend if it has curves."""
    if isinstance(chart, Lines):
        return curves_figure(chart)
    draw: Any = {Bars: _bars, Radar: _radar, Points: _points_of}[type(chart)]
    svg = draw(chart)
    return f"<figure>{_caption(chart.title)}{svg}</figure>"


def curves_figure(
    chart: Lines, *, legend: bool = True, from_zero: bool = False, ends: bool = False
) -> str:
    """Returns curves as an HTML element.

    The colour of a curve is that of its group ``g[data-curve]``, so that a page may set others.

    Args:
      chart: the curves; there must be one.
      legend: whether to show the names of the curves below, as buttons that hide them.
      from_zero: whether the x axis includes 0.
      ends: whether to mark the last point of each curve.
    """
    x_ends = _ends(
        [curve.x for curve in chart.curves]
        + [run[1] for run in chart.runs]
        + [np.zeros(1)] * from_zero
    )
    y_ends = _ends(
        [end for curve in chart.curves for end in (curve.band.low, curve.band.high)]
        + [run[2] for run in chart.runs]
    )
    x = _scale(x_ends, _LEFT, _WIDTH - _RIGHT)
    if chart.log:
        y_ends = (float(np.log10(y_ends[0])), float(np.log10(y_ends[1])))
    linear = _scale(y_ends, _HEIGHT - _BOTTOM, _TOP)
    y = (lambda value: linear(np.log10(value))) if chart.log else linear
    groups = [
        _curve(curve, number, chart, x, y, ends)
        for number, curve in zip(numbers_of(chart), chart.curves, strict=True)
    ]
    cursor = f'<line class="cursor" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    axes = _axis_x(chart.x, x_ends, x, _HEIGHT) + _axis_y(chart.y, y_ends, linear, chart.log)
    data = {
        "name": chart.x,
        "size": [_WIDTH, _HEIGHT],
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "x": x_ends,
        "curves": [
            {
                "name": curve.name,
                "x": _rounded(curve.x),
                **{name: _rounded(values) for name, values in curve.band._asdict().items()},
            }
            for curve in chart.curves
        ],
    }
    # In the text, "</script" would end the element, and "<!--" with "<script" would hide its end.
    text = json.dumps(data).replace("<", "\\u003c")
    return (
        f'<figure data-plot="{escape(chart.title)}">{_caption(chart.title)}'
        f"{_svg(chart.title, _HEIGHT, [axes, *groups, cursor])}{_legend(chart) if legend else ''}"
        f'<div class="tip" hidden></div><script type="application/json">{text}</script></figure>'
    )


def picture(chart: Drawn) -> str:
    """Returns a chart as an SVG file, the same for the same numbers; it needs no other file."""
    names = [] if isinstance(chart, Bars) else [name for name, *_ in _rows_of(chart)]
    svg = re.search(r"<svg.*</svg>", figure(chart), re.DOTALL)
    assert svg is not None
    head, body = svg[0].split("\n", 1)
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', head)[0])
    top = _ROW * (1 + (len(names) > 1))
    legend, at = [], _LEFT
    for number, name in zip(numbers_of(chart), names if len(names) > 1 else [], strict=False):
        legend.append(
            f'<text x="{at:.0f}" y="44" style="fill:{_color(number)}">'
            f"{MARKS[number % len(MARKS)]} {escape(name)}</text>"
        )
        at += 30 + _LETTER * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height + top:g}" '
        f'role="img" aria-label="{escape(chart.title)}">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{_LEFT:.0f}" y="20" style="font-weight:bold">{escape(chart.title)}</text>\n'
        f'{"".join(legend)}<g transform="translate(0 {top})">\n{body[: -len("</svg>")]}</g>\n'
        "</svg>\n"
    )


def _caption(title: str) -> str:
    return f"<figcaption>{escape(title)}</figcaption>"


def _curve(
    curve: Curve,
    number: int,
    chart: Lines,
    x: Callable[[Any], Any],
    y: Callable[[Any], Any],
    ends: bool,
) -> str:
    """Returns a curve with its band, its marks and the runs behind it."""
    name, at, band = curve
    parts = [
        f'<path d="M{_points(x, y, *run).replace(" ", "L")}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.45"/>'
        for method, *run in chart.runs
        if method == number
    ]
    if (band.low != band.high).any():
        area = _points(x, y, [*at, *at[::-1]], [*band.low, *band.high[::-1]])
        parts.append(f'<polygon points="{area}" fill="currentColor" fill-opacity="0.18"/>')
    parts.append(
        f'<polyline points="{_points(x, y, at, band.estimate)}" fill="none" '
        'stroke="currentColor" stroke-width="2"/>'
    )
    if chart.numbers:
        step = max(1, len(at) // _MARKED)
        places = zip(x(at[::step]), y(band.estimate[::step]), strict=True)
        parts += [_mark(number, *place) for place in places]
    if ends:
        parts.append(
            f'<circle cx="{x(at[-1]):.1f}" cy="{y(band.estimate[-1]):.1f}" r="3" '
            'fill="currentColor"/>'
        )
    return f'<g data-curve="{escape(name)}" style="color:{_color(number)}">{"".join(parts)}</g>'


def _rows_of(chart: Drawn) -> Sequence[tuple[Any, ...]]:
    if isinstance(chart, Lines):
        return chart.curves
    return chart.rows if isinstance(chart, Bars) else chart.shapes


def numbers_of(chart: Drawn) -> Sequence[int]:
    """Returns the number of the method of each curve or row; -1 for rows of no single method."""
    rows = _rows_of(chart)
    return [-1] * len(rows) if chart.numbers is None else chart.numbers or range(len(rows))


def _color(number: int) -> str:
    return "currentColor" if number < 0 else COLORS[number % len(COLORS)]


def _mark(number: int, x: float, y: float) -> str:
    shape = _SHAPES[max(0, number) % len(_SHAPES)]
    return f'<path d="M{x:.1f} {y:.1f}{shape}" fill="{_color(number)}"/>'


def _legend(chart: Lines) -> str:
    buttons = "".join(
        f'<button type="button" aria-pressed="true">'
        f'<span style="color:{_color(number)}">{MARKS[number % len(MARKS)]}</span> {escape(name)}'
        "</button>"
        for number, (name, _, _) in zip(numbers_of(chart), chart.curves, strict=True)
    )
    return f'<div class="legend">{buttons}</div>'


def _bars(chart: Bars) -> str:
    height = _TOP + _ROW * len(chart.rows) + _BOTTOM
    left = min(20 + _LETTER * max(len(name) for name, _ in chart.rows), _WIDTH * 0.55)
    lines = [] if chart.line is None else [chart.line]
    ends = _ends([np.array([*lines, *interval]) for _, interval in chart.rows])
    x = _scale(ends, left, _WIDTH - _RIGHT)
    parts = [_axis_x(chart.x, ends, x, height)]
    for at in lines:
        parts.append(
            f'<line class="reference" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" '
            f'y2="{height - _BOTTOM}"/>'
        )
    for row, (number, (name, interval)) in enumerate(
        zip(numbers_of(chart), chart.rows, strict=True)
    ):
        estimate, low, high = interval
        y = _TOP + _ROW * (row + 0.5)
        color = _color(number)
        parts.append(
            f"<g><title>{escape(name)}: {estimate:,.3f} [{low:,.3f}, {high:,.3f}]</title>"
            f'<rect x="{x(low):.1f}" y="{y - 8:.1f}" width="{max(x(high) - x(low), 1):.1f}" '
            f'height="16" fill="{color}" fill-opacity="0.35"/>'
            f'{_mark(number, x(estimate), y)}</g><text x="{left - 8:.1f}" y="{y + 4:.1f}" '
            f'text-anchor="end">{escape(name)}</text>'
        )
    return _svg(chart.title, height, parts)


def _radar(chart: Radar) -> str:
    middle, radius = np.array([_WIDTH / 2, _HEIGHT / 2]), _HEIGHT / 2 - 40
    turns = 2 * np.pi * np.arange(len(chart.axes)) / len(chart.axes)
    ways = np.stack([np.sin(turns), -np.cos(turns)], axis=1)  # the first axis goes up

    def area(values: Any, style: str) -> str:
        places = middle + radius * np.broadcast_to(values, len(ways))[:, None] * ways
        return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" {style}/>'

    parts = []
    for ring in (0.25, 0.5, 0.75, 1.0):
        parts.append(area(ring, 'class="grid" fill="none"'))
        x, y = middle + radius * ring * ways[0]
        parts.append(f'<text x="{x + 4:.1f}" y="{y + 12:.1f}">{_short(ring)}</text>')
    for name, way in zip(chart.axes, ways, strict=True):
        (x, y), (at, height) = middle + radius * way, middle + (radius + 12) * way
        anchor = "middle" if abs(way[0]) < 0.1 else "start" if way[0] > 0 else "end"
        parts.append(
            f'<line class="grid" x1="{middle[0]:.1f}" y1="{middle[1]:.1f}" x2="{x:.1f}" '
            f'y2="{y:.1f}"/><text x="{at:.1f}" y="{height + 4:.1f}" text-anchor="{anchor}">'
            f"{escape(name)}</text>"
        )
    for number, (name, values) in zip(numbers_of(chart), chart.shapes, strict=True):
        told = ", ".join(f"{a} {v:.2f}" for a, v in zip(chart.axes, values, strict=True))
        color = _color(number)
        style = f'fill="{color}" fill-opacity="0.12" stroke="{color}" stroke-width="2"'
        places = middle + radius * np.array(values)[:, None] * ways
        marks = "".join(_mark(number, x, y) for x, y in places)
        title = f"<title>{escape(name)}: {escape(told)}</title>"
        parts.append(f"<g>{title}{area(np.array(values), style)}{marks}</g>")
    return _svg(chart.title, _HEIGHT, parts)


def _points_of(chart: Points) -> str:
    across = np.array([x for _, x, _ in chart.points], float)
    across = np.log10(across) if chart.log else across
    x_ends, y_ends = _ends([across]), _ends([np.array([y for _, _, y in chart.points])])
    x = _scale(x_ends, _LEFT + 6, _WIDTH - _RIGHT - 6)  # so that no point is cut off
    y = _scale(y_ends, _HEIGHT - _BOTTOM - 6, _TOP + 6)
    name = f"log10 of {chart.x}" if chart.log else chart.x
    parts = [_axis_x(name, x_ends, x, _HEIGHT), _axis_y(chart.y, y_ends, y)]
    for at, (label, _, value) in zip(across, chart.points, strict=True):
        parts.append(
            f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="4" fill="{_color(0)}" '
            f'fill-opacity="0.6"><title>{escape(label)}, {escape(chart.y)} {_short(value)}</title>'
            "</circle>"
        )
    return _svg(chart.title, _HEIGHT, parts)


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


def _axis_y(
    name: str, ends: tuple[float, float], y: Callable[[float], float], log: bool = False
) -> str:
    ticks = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(at):.1f}" '
        f'y2="{y(at):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">'
        f"{_short(10**at if log else at)}</text>"
        for at in _ticks(ends)
    ]
    if not name:
        return "".join(ticks)
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


def _scale(ends: tuple[float, float], start: float, stop: float) -> Callable[[Any], Any]:
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
    return f"{value + 0.0:.4g}"  # no sign before 0


def _points(
    x: Callable[[Any], Any],
    y: Callable[[Any], Any],
    xs: Sequence[float] | np.ndarray,
    ys: Sequence[float] | np.ndarray,
) -> str:
    places = zip(x(np.asarray(xs)).tolist(), y(np.asarray(ys)).tolist(), strict=True)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in places)


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
