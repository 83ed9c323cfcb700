"""The numbers of a report as tables in Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import re
import statistics as numbers
from collections.abc import Iterator, Mapping, Sequence

from rlstack.math import intervals
from rlstack.math.intervals import Interval
from rlstack.programs.tools.report.runs import Run, Unfinished
from rlstack.programs.tools.report.statistics import (
    OF_ONE_TASK,
    OVER_TASKS,
    Estimates,
    Statistics,
    frames_of,
)

_COLUMNS = (
    "preset",
    "agent",
    "environment",
    "frames",
    "return: mean ± deviation (median)",
    "IQM [95 % interval]",
    "by seed",
    "seconds a run",
    "frames/s",
    "commit",
)
_WORDS = ("method", "task", "preset", "option", "value")  # columns that are not numbers
_OPTIONS = ("preset", "option", "value")
_FAULTS = ("preset", "seed", "topology", "launched as", "restarts", "frames lost")
_VERSIONS = ("preset", "seeds", "rlstack", "commit", "packages", "machine")
_UNFINISHED = ("preset", "task", "seed", "directory", "state")
_CSV = (
    *("method", "other", "task", "scale", "statistic", "estimate", "low", "high", "runs"),
    "unfinished",
)
_SPECIAL = {  # the others get a backslash
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "-": "-{}",
}

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the columns' names, and the rows


def of_groups(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Returns a row for each group of runs that differ in their seeds."""
    return _COLUMNS, [_row(name, runs) for name, runs in groups.items()]


def of_unfinished(runs: Sequence[Unfinished]) -> Table:
    """Returns a row for each run without a result."""
    return _UNFINISHED, [
        [one.name, one.task, str(one.experiment.seed), one.path.name, one.state] for one in runs
    ]


def of_versions(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Returns a row for each group and all versions and machines with which its runs were made."""
    made: dict[tuple[str, ...], list[str]] = {}  # the seeds of each
    for name, runs in groups.items():
        for result in (run.result for run in runs):
            packages = dict(result.versions)
            own = packages.pop("rlstack", "unknown")
            listed = ", ".join(f"{package} {version}" for package, version in packages.items())
            rest = (
                own,
                _short(result.git_commit),
                listed or "unknown",
                result.machine or "unknown",
            )
            made.setdefault((name, *rest), []).append(str(result.seed))
    return _VERSIONS, [
        [name, ", ".join(dict.fromkeys(seeds)), *rest] for (name, *rest), seeds in made.items()
    ]


def _short(commit: str) -> str:
    """Returns the first digits of a commit, and whether files differed from it."""
    digits, dash, rest = commit.partition("-")
    return f"{digits[:7]}{dash}{rest}"


def of_options(groups: Mapping[str, Sequence[Run]], *, known: bool = True) -> Table:
    """Returns a row for each option of a group that differs from the preset's.

    If runs of the group have several values, the row has all of them.

    Args:
      groups: the runs.
      known: whether to take the groups with a preset of rlstack, or the others, with all options.
    """
    rows = []
    for name, runs in groups.items():
        if runs[0].is_known is not known:
            continue
        values: dict[str, dict[str, None]] = {}  # ordered sets
        for run in runs:
            for option, value in run.changes.items():
                values.setdefault(option, {})[str(value)] = None
        rows += [[name, option, ", ".join(texts)] for option, texts in values.items()]
    return _OPTIONS, rows


def of_faults(groups: Mapping[str, Sequence[Run]]) -> Table:
    """Returns a row for each run that lost nodes and restarted them."""
    rows = [
        [
            run.result.preset,
            str(run.result.seed),
            run.result.topology,
            run.experiment.program.launch,
            f"{run.restarts:,}",
            f"{run.lost_frames:,}",
        ]
        for runs in groups.values()
        for run in runs
        if run.restarts
    ]
    return _FAULTS, rows


def of_tasks(found: Statistics) -> Table:
    """Returns the returns of each method on each task, with intervals."""
    rows = [[one.method, one.tasks[0], _runs(one), *_cells(one)] for one in found.of_tasks]
    return ("method", "task", "runs", *OF_ONE_TASK), rows


def over_tasks(found: Statistics) -> Table:
    """Returns the normalised scores of each method over its tasks, with intervals."""
    rows = [[one.method, str(len(one.tasks)), _runs(one), *_cells(one)] for one in found.over_tasks]
    return ("method", "tasks", "runs", *OVER_TASKS), rows


def markdown(table: Table) -> str:
    """Returns a table in Markdown."""
    columns, rows = table
    lines = [columns, ["---"] * len(columns), *(map(plain, cells) for cells in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain(text: str) -> str:
    """Returns text for a line of Markdown, where no part of it is HTML, a link or a cell."""
    text = " ".join(text.splitlines()).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("](", "]\\(").replace("&", "&amp;").replace("<", "&lt;")


def latex(found: Statistics, warnings: Sequence[str] = ()) -> str:
    """Returns the tables of statistics in LaTeX, for any document class without packages."""
    tables = [("Returns", of_tasks(found))]
    if found.normalisation is not None:
        tables.insert(0, (f"Scores, {found.normalisation.text}", over_tasks(found)))
    parts = [
        "% Written by rlstack report. Brackets are 95 % stratified bootstrap intervals.\n",
        *(f"% Warning: {escaped(text)}\n" for text in warnings),
        *(f"% {escaped(title)}\n{tabular(table)}\n" for title, table in tables),
        *(f"% {escaped(str(comparison))}\n" for comparison in found.comparisons),
    ]
    return "\n".join(parts)


def to_csv(found: Statistics) -> str:
    """Returns a line for each statistic, and for each probability of improvement.

    The scale is `return`, `normalised` or `probability`. Several tasks are `all`.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_CSV)
    writer.writerows(_lines(found))
    return out.getvalue()


def _lines(found: Statistics) -> Iterator[Sequence[object]]:
    for scale, every in (("return", found.of_tasks), ("normalised", found.over_tasks)):
        for one in every:
            task = "all" if scale == "normalised" else one.tasks[0]
            for name, interval in one.values.items():
                yield one.method, "", task, scale, name, *interval, one.runs, one.unfinished
    missing = {method.name: method.unfinished for method in found.methods}
    for comparison in found.comparisons:
        task = "all" if len(comparison.tasks) > 1 else comparison.tasks[0]
        names = (comparison.method, comparison.other, task)
        runs = " and ".join(map(str, comparison.runs))
        unfinished = " and ".join(
            str(sum(missing[name].get(task, 0) for task in comparison.tasks)) for name in names[:2]
        )
        yield *names, "probability", "improvement", *comparison.probability, runs, unfinished


def _row(name: str, runs: Sequence[Run]) -> list[str]:
    results = [run.result for run in runs]
    returns = [result.eval_return_mean for result in results]
    spread = numbers.stdev(returns) if len(returns) > 1 else 0.0
    digits = _digits(returns)
    shown = [f"{value:,.{digits}f}" for value in returns]
    mean, median, deviation = (
        f"{value:,.{digits}f}" for value in (numbers.mean(returns), numbers.median(returns), spread)
    )
    return [
        name,
        runs[0].agent,
        runs[0].environment,
        frames_of(runs),
        f"{mean} ± {deviation} ({median})" if len(runs) > 1 else f"{mean} (1 run)",
        text_of(intervals.bootstrap(returns), digits) if len(runs) > 1 else mean,
        ", ".join(f"{result.seed}: {value}" for result, value in zip(results, shown, strict=True)),
        f"{numbers.median(result.wall_seconds for result in results):,.0f}",
        f"{numbers.median(result.frames_per_second for result in results):,.0f}",
        ", ".join(sorted({_short(result.git_commit) for result in results})),
    ]


def text_of(interval: Interval, digits: int) -> str:
    """Returns an estimate with its interval in brackets."""
    estimate, low, high = (f"{value:,.{digits}f}" for value in interval)
    return f"{estimate} [{low}, {high}]"


def _digits(values: Sequence[float]) -> int:
    return 1 if max(map(abs, values)) >= 10 else 3


def _cells(one: Estimates) -> list[str]:
    """Returns the statistics with their intervals; single runs have none."""
    digits = _digits([end for interval in one.values.values() for end in interval])
    if one.runs == len(one.tasks):
        return [f"{interval.estimate:,.{digits}f}" for interval in one.values.values()]
    return [text_of(interval, digits) for interval in one.values.values()]


def _runs(one: Estimates) -> str:
    """Returns the number of runs, and of all if some have no result."""
    return f"{one.runs} of {one.runs + one.unfinished}" if one.unfinished else str(one.runs)


def tabular(table: Table) -> str:
    """Returns a table in LaTeX, which needs no packages."""
    columns, rows = table
    words = sum(column in _WORDS for column in columns)
    lines = [" & ".join(map(escaped, cells)) + r" \\" for cells in (columns, *rows)]
    # At the start of a row these would be arguments of the row before.
    lines = [f"{{}}{line}" if line.startswith(("[", "*")) else line for line in lines]
    lines.insert(1, r"\hline")
    spec = "l" * words + "r" * (len(columns) - words)
    return "\n".join([rf"\begin{{tabular}}{{{spec}}}", *lines, r"\end{tabular}"])


def escaped(text: str) -> str:
    """Returns text for LaTeX, where no character of it is a command; numbers have a minus sign."""
    text = re.sub(r"[\\~^<>|&%$#_{}]|-(?=-)", lambda m: _SPECIAL.get(m[0], f"\\{m[0]}"), text)
    return re.sub(r"(?<![\w}-])-(?=\d)", "$-$", text)
