"""`rlstack report --paper`: table, curves and protocol for a paper, in LaTeX and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from rlstack.math import intervals
from rlstack.programs.tools.charts import COLORS, Curve, Lines
from rlstack.programs.tools.report import plots, statistics, tables
from rlstack.programs.tools.report.report import Report, sentence
from rlstack.programs.tools.report.runs import Run
from rlstack.programs.tools.report.tables import Table
from rlstack.references import name_of
from rlstack.storage import files

_SHOWN = 6  # points of a curve in a table
_MARKS = ("*", "square*", "triangle*", "diamond*", "pentagon*", "+")  # of pgfplots
_UNKNOWN = "not recorded (runs of an earlier version)"
Paragraph = tuple[str, str]  # title and text


def write(report: Report, folder: Path) -> list[Path]:
    """Writes ``paper.md`` and ``paper.tex`` to a folder; returns both.

    The file in LaTeX is to be read with ``\\input``. Its curves need pgfplots and its library
    fillbetween.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = {"paper.md": _markdown(report), "paper.tex": _latex(report)}
    for name, text in found.items():
        # Names of files that are not UTF-8 are lone surrogates here.
        files.write(folder / name, text.encode("utf-8", "backslashreplace"))
    return [folder / name for name in found]


def protocol(report: Report) -> list[Paragraph]:
    """Returns what a reader must know to judge and to repeat the results."""
    found = report.statistics
    units = [(f"{m.name} on {task}", runs) for m in found.methods for task, runs in m.tasks.items()]
    every = [run for _, runs in units for run in runs]
    seeds = _each(units, lambda runs: ", ".join(str(run.result.seed) for run in runs))
    episodes = _each(units, _evaluation)
    scale = "" if found.normalisation is None else f" Scores are {found.normalisation.text}."
    seconds = float(np.median([run.result.wall_seconds for run in every]))
    paragraphs = [
        ("Seeds", f"Independent runs, which differ in their seeds only. Seeds: {seeds}."),
        (
            "Frames",
            "Budgets are environment steps of the agent, of all environments together. "
            f"Frames: {_each(units, statistics.frames_of)}.",
        ),
        (
            "Evaluation",
            "The score of a run is the mean return of the greedy policy with its last params, in "
            f"environments of its own. Episodes: {episodes}.{scale}",
        ),
        (
            "Intervals",
            f"Brackets are {statistics.LEVEL:.0%} intervals by stratified percentile bootstrap "
            f"over runs, with {intervals.RESAMPLES:,} samples (Agarwal et al. 2021, "
            "arXiv:2108.13264); for a probability they are exact where no pair of runs has another "
            "outcome (Clopper and Pearson 1934). IQM is the mean of the middle half of the runs. "
            f"Curves are IQMs at equal frames, with bands of {statistics.RESAMPLES:,} samples.",
        ),
        ("Versions", f"{_versions(every)}."),
        ("Machine", f"{_machines(every)}. Median duration of a run: {seconds:,.0f} s."),
    ]
    return [
        *paragraphs,
        *(("Comparison", sentence(str(comparison))) for comparison in found.comparisons),
        *(("Limits", text) for text in report.warnings),
    ]


def _versions(runs: Sequence[Run]) -> str:
    commits = _distinct(run.result.git_commit for run in runs)
    versions = _distinct(
        ", ".join(f"{name} {version}" for name, version in run.result.versions.items())
        for run in runs
    )
    return f"Commit of rlstack: {commits or 'unknown'}. Packages: {versions or _UNKNOWN}"


def _machines(runs: Sequence[Run]) -> str:
    return _distinct(run.result.machine for run in runs) or f"The machine was {_UNKNOWN}"


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(text for text in dict.fromkeys(texts) if text)


def _evaluation(runs: Sequence[Run]) -> str:
    """Returns the number of episodes of an evaluation, and what else it depends on."""
    configs = [run.experiment.evaluator for run in runs]
    parts = [
        f"{_ends(run.result.eval_episodes for run in runs)} of at most "
        f"{_ends(cfg.max_steps for cfg in configs)} steps"
    ]
    if any(cfg.epsilon for cfg in configs):
        rates = dict.fromkeys(f"{cfg.epsilon:g}" for cfg in configs)
        parts.append(f"with random actions with probability {' or '.join(rates)}")
    own = dict.fromkeys(name_of(cfg.factory) for cfg in configs if cfg.factory)
    if own:
        parts.append(f"by the evaluator {' or '.join(own)}")
    return ", ".join(parts)


def _ends(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return " to ".join(f"{number:,}" for number in dict.fromkeys((found[0], found[-1])))


def _each(units: Sequence[tuple[str, Sequence[Run]]], text: Callable[[Sequence[Run]], str]) -> str:
    """Returns a text for all units, or one for each if they differ."""
    texts = {name: text(runs) for name, runs in units}
    if len(set(texts.values())) == 1:
        return f"{text(units[0][1])}{' (all)' if len(texts) > 1 else ''}"
    return "; ".join(f"{name}: {found}" for name, found in texts.items())


def _sections(report: Report) -> list[tuple[str, Table]]:
    found = report.statistics
    sections = [("Returns", tables.of_tasks(found))]
    if found.normalisation is not None:
        sections.append((f"Scores, {found.normalisation.text}", tables.over_tasks(found)))
    return [*sections, ("Options that differ from the presets", tables.of_options(report.groups))]


def _curves(report: Report) -> list[Lines]:
    made = plots.of_statistics(report.statistics).values()
    return [plot for plot in made if isinstance(plot, Lines)]


def _values(curve: Curve) -> list[list[str]]:
    """Returns rows of a table: x and the estimate with its interval, at few points."""
    picked = np.unique(np.linspace(0, len(curve.x) - 1, _SHOWN).round().astype(int))
    digits = 1 if np.abs(curve.band.estimate).max() >= 10 else 3
    return [
        [
            curve.name,
            f"{curve.x[i]:,.0f}" if abs(curve.x[i]) >= 100 else f"{curve.x[i]:.3g}",
            tables.text_of(intervals.Interval(*(float(part[i]) for part in curve.band)), digits),
        ]
        for i in picked
    ]


def _markdown(report: Report) -> str:
    parts = ["# Results"]
    for title, table in _sections(report):
        if table[1]:
            parts += [f"## {tables.plain(title)}", tables.markdown(table)]
    for plot in _curves(report):
        rows = [row for curve in plot.curves for row in _values(curve)]
        parts += [
            f"## {tables.plain(plot.title)}",
            tables.markdown((["method", plot.x, plot.y], rows)),
        ]
    parts.append("## Protocol")
    parts += [f"**{title}.** {tables.plain(text)}" for title, text in protocol(report)]
    return "\n\n".join(parts) + "\n"


def _latex(report: Report) -> str:
    parts = [
        "% Written by rlstack report --paper. The preamble needs:\n"
        "% \\usepackage{pgfplots} \\pgfplotsset{compat=newest} \\usepgfplotslibrary{fillbetween}"
    ]
    for title, table in _sections(report):
        if table[1]:
            parts.append(_float("table", title, tables.tabular(table)))
    parts += [_float("figure", plot.title, _axis(plot)) for plot in _curves(report)]
    parts += [f"\\paragraph{{{title}.}} {tables.escaped(text)}" for title, text in protocol(report)]
    return "\n\n".join(parts) + "\n"


def _float(kind: str, title: str, body: str) -> str:
    # graphicx, which pgfplots loads, makes what is wider than the text as wide as the text.
    width = "\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi"
    body = f"\\resizebox{{{width}}}{{!}}{{%\n{body}}}"
    return (
        f"\\begin{{{kind}}}\n\\centering\n{body}\n\\caption{{{tables.escaped(title)}.}}\n"
        f"\\end{{{kind}}}"
    )


def _axis(plot: Lines) -> str:
    lines = [
        "\\begin{tikzpicture}",
        f"\\begin{{axis}}[xlabel={{{tables.escaped(plot.x)}}}, "
        f"ylabel={{{tables.escaped(plot.y)}}}, legend pos=outer north east]",
    ]
    for number, curve in zip(plot.numbers, plot.curves, strict=True):
        color = f"rlstack{number}"
        code, mark = COLORS[number % len(COLORS)][1:].upper(), _MARKS[number % len(_MARKS)]
        lines.insert(0, f"\\definecolor{{{color}}}{{HTML}}{{{code}}}")
        for end in ("low", "high"):
            lines.append(
                f"\\addplot[draw=none, forget plot, name path={end}{number}] "
                f"{_coordinates(curve.x, getattr(curve.band, end))};"
            )
        lines += [
            f"\\addplot[{color}, opacity=0.2, forget plot] "
            f"fill between[of=low{number} and high{number}];",
            f"\\addplot[{color}, thick, mark={mark}, mark repeat=12] "
            f"{_coordinates(curve.x, curve.band.estimate)};",
            f"\\addlegendentry{{{tables.escaped(curve.name)}}}",
        ]
    return "\n".join([*lines, "\\end{axis}", "\\end{tikzpicture}"])


def _coordinates(x: np.ndarray, y: np.ndarray) -> str:
    return f"coordinates {{{' '.join(f'({a:.6g},{b:.6g})' for a, b in zip(x, y, strict=True))}}}"
