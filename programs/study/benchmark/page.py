"""The page of a suite: scores with intervals, published scores beside them, and pictures.

Everything is made from the records of `records`, and nothing depends on the machine or the time:
the same records give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstack.programs.study.benchmark import bsuite
from rlstack.programs.study.benchmark.records import Record, with_ranges
from rlstack.programs.study.benchmark.suites import Reference, Suite
from rlstack.programs.study.benchmark.watch import Found, compare
from rlstack.programs.tools import charts
from rlstack.programs.tools.report import plots, statistics, tables
from rlstack.programs.tools.report.report import Report, sentence
from rlstack.programs.tools.report.runs import Method, Run
from rlstack.programs.tools.report.statistics import Statistics
from rlstack.programs.tools.report.tables import Table
from rlstack.storage import files

_INTERVALS = (
    "Brackets are 95 % intervals by stratified bootstrap over runs (Agarwal et al. 2021, "
    "<https://arxiv.org/abs/2108.13264>); [statistics](../statistics.md) explains them."
)


def write(suite: Suite, records: Sequence[Record], folder: Path) -> Path:
    """Writes the page of a suite and its pictures; returns the path of the page."""
    made = pages(suite, records)
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text)
    return folder / f"{suite.name}.md"


def pages(suite: Suite, records: Sequence[Record]) -> dict[str, str]:
    """Returns the files of a suite's page by their names: Markdown, and pictures in SVG.

    Raises:
      ValueError: no run has finished, or records are of different recorded data.
    """
    suite = with_ranges(suite, records)
    runs = {_method(suite, record): record.runs(suite) for record in records}
    if not any(tasks for tasks in runs.values()):
        raise ValueError(f"benchmark {suite.name}: one run or more must have finished; none has.")
    unfinished = {
        _method(suite, record): {name: task.unfinished for name, task in record.tasks.items()}
        for record in records
    }
    methods = [Method(name, tasks, unfinished[name]) for name, tasks in runs.items() if tasks]
    tasks_of = {  # each method's tasks, by the names of their groups
        method.name: {
            task if len(methods) == 1 else f"{method.name}, {task}": task for task in method.tasks
        }
        for method in methods
    }
    groups = {
        group: method.tasks[task]
        for method in methods
        for group, task in tasks_of[method.name].items()
    }
    drawn: dict[str, charts.Drawn]
    if suite.tags:
        parts, drawn = bsuite.sections(suite, records)
        parts = [_head(suite, records), *_warned(_missing(suite, records)), *parts]
    else:
        parts, drawn = _of_returns(suite, records, methods, groups)
    (_, seeds, *columns), rows = tables.of_versions(groups)
    versions = _merged((("runs", seeds, *columns), rows), tasks_of)
    parts += ["## Versions\n", tables.markdown(versions), ""]
    (_, *columns), rows = tables.of_options(groups)
    if rows:
        changed = tables.markdown(_merged((("runs", *columns), rows), tasks_of))
        parts += ["## Options that differ from the preset\n", changed, ""]
    text = "\n".join(parts).rstrip() + "\n"
    return {f"{suite.name}.md": text, **{n: charts.picture(plot) for n, plot in drawn.items()}}


def _of_returns(
    suite: Suite,
    records: Sequence[Record],
    methods: Sequence[Method],
    groups: dict[str, Sequence[Run]],
) -> tuple[list[str], dict[str, charts.Drawn]]:
    """Returns the parts of a page of returns, and its charts by the names of their files."""
    found, scaled = _statistics(suite, methods)
    drawn: dict[str, charts.Drawn] = {
        f"{suite.name}/{name.replace(' ', '-')}.svg": plot
        for name, plot in _plots(found, scaled).items()
        if name in ("profile", "all tasks") or name.startswith("task ")
    }
    texts = [*_missing(suite, records, Report(groups, found).warnings)]
    parts = [_head(suite, records), *_warned(texts)]
    if scaled is not None and scaled.normalisation is not None:
        text = scaled.normalisation.text
        title = f"## Scores over tasks\n\n{text[0].upper()}{text[1:]}.\n"
        parts += [title, tables.markdown(tables.over_tasks(scaled)), "", _INTERVALS, ""]
    parts += ["## Returns\n", tables.markdown(_returns(suite, found)), ""]
    if scaled is None:
        parts += [_INTERVALS, ""]
    parts += [f"- {_of(reference)}" for reference in suite.references]
    parts += [""] * bool(suite.references)
    if watched := compare(suite, records):
        parts += [_bands(watched), ""]
    if found.comparisons:
        parts += ["## Comparison\n", *(f"- {sentence(str(c))}" for c in found.comparisons), ""]
    parts += ["## Curves\n", *(f"![{plot.title}]({name})" for name, plot in drawn.items()), ""]
    parts += ["## Runs\n", tables.markdown(tables.of_groups(groups)), ""]
    return parts, drawn


def _merged(table: Table, tasks_of: Mapping[str, Mapping[str, str]]) -> Table:
    """Returns a table in which rows that are equal but for the first column are one.

    Args:
      table: a table with names of groups in its first column.
      tasks_of: the tasks of each method, by the names of their groups.
    """
    columns, rows = table
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        names.setdefault(tuple(rest), []).append(name)
    return columns, [[_named(found, tasks_of), *rest] for rest, found in names.items()]


def _named(groups: Sequence[str], tasks_of: Mapping[str, Mapping[str, str]]) -> str:
    """Returns a short text that names some groups, such as "all but A" or "ppo: A, B"."""
    methods: dict[str, list[str]] = {}  # the methods of which each text names the tasks
    for method, tasks in tasks_of.items():
        present = [task for group, task in tasks.items() if group in groups]
        if not present:
            continue
        absent = [task for group, task in tasks.items() if group not in groups]
        text = ", ".join(present)
        if len(absent) < len(present):
            text = f"all but {', '.join(absent)}" if absent else "all"
        methods.setdefault(text, []).append(method)
    return "; ".join(
        text if len(those) == len(tasks_of) else f"{', '.join(those)}: {text}"
        for text, those in methods.items()
    )


def _head(suite: Suite, records: Sequence[Record]) -> str:
    lines = [
        f"# {suite.title}\n",
        f"{suite.text} Source: {_linked(suite.source)}.\n",
        f"{suite.protocol}\n",
        "These commands train the missing runs and write this page:\n",
        "<!-- not run: it takes long -->\n```sh",
    ]
    for record in records:
        words = [f"rlstack benchmark {suite.name}"]
        words += [f"--agent {record.agent}"] if len(suite.agents) > 1 else []
        words += _choice(suite, record)
        if reduced := _reduced(suite, record):
            words += [f"--budget {reduced}"]
        lines.append(" ".join([*words, "--out docs/benchmarks"]))
    data = f"data/{suite.name}"
    lines += [
        f"rlstack benchmark {suite.name} --page --out docs/benchmarks",
        "```\n",
        f"The last command writes this page from the files in `{data}/`: "
        + ", ".join(f"[{record.agent}.json]({data}/{record.agent}.json)" for record in records)
        + ". These files have all scores, configs and curves.\n",
    ]
    return "\n".join(lines)


def _choice(suite: Suite, record: Record) -> list[str]:
    """Returns the options that choose as many runs of each task as a record has."""
    made = {name: len(task.runs) + task.unfinished for name, task in record.tasks.items()}
    tasks = [task for task in suite.tasks if task.name in made]
    for few, words in ((False, []), (True, ["--settings few"])):
        if all(suite.runs_of(task, few) == made[task.name] for task in tasks):
            return words
    return [f"--seeds {max(made.values())}"]


def _missing(suite: Suite, records: Sequence[Record], others: Sequence[str] = ()) -> Sequence[str]:
    """Returns others' warnings and those of what records lack."""
    texts = list(others)
    for record in records:
        if reduced := _reduced(suite, record):
            has = f"has {reduced:,} frames a run instead of the {suite.frames:,} of the benchmark"
            if not suite.frames:
                has = f"has at most {reduced:,} frames a run, fewer than the benchmark"
            texts.insert(
                0,
                f"{record.agent} {has}, so its scores are not comparable with published ones.",
            )
        if lacking := [t.name for t in suite.tasks if t.name not in record.tasks and not t.files]:
            texts.append(f"{record.agent} lacks {', '.join(lacking)}.")
        if missing := sum(task.unfinished for task in record.tasks.values()):
            texts.append(f"{missing} runs of {record.agent} have not finished, and do not count.")
    return texts


def _warned(texts: Sequence[str]) -> list[str]:
    return [f"> Warning: {tables.plain(text)}\n" for text in texts]


def _reduced(suite: Suite, record: Record) -> int:
    """Returns the budget of the runs of a record whose budget is not the suite's, 0 for none."""
    usual = {task.name: task.frames or suite.frames for task in suite.tasks}
    found = {
        task.experiment.frames
        for name, task in record.tasks.items()
        if usual.get(name, 0) not in (0, task.experiment.frames)
    }
    return found.pop() if len(found) == 1 else 0


def _method(suite: Suite, record: Record) -> str:
    reduced = _reduced(suite, record)
    return f"{record.agent} ({reduced:,} frames)" if reduced else record.agent


def _statistics(suite: Suite, methods: Sequence[Method]) -> tuple[Statistics, Statistics | None]:
    """Returns the statistics of all tasks, and of those that have normalised scores, if any."""
    compare = _have_common(methods)
    ranged = {task.name for task in suite.tasks if task.range and suite.ranges}
    if all(task in ranged for method in methods for task in method.tasks):
        found = statistics.compute(methods, suite.normalisation, compare=compare)
        return found, found
    some = [
        method._replace(tasks={name: method.tasks[name] for name in method.tasks if name in ranged})
        for method in methods
        if ranged & set(method.tasks)
    ]
    scaled = statistics.compute(some, suite.normalisation) if some else None
    return statistics.compute(methods, compare=compare), scaled


def _plots(found: Statistics, scaled: Statistics | None) -> dict[str, plots.Plot]:
    shown = plots.of_statistics(found)
    if scaled is None or scaled is found:
        return shown
    return {**plots.of_statistics(scaled), **shown}


def _have_common(methods: Sequence[Method]) -> bool:
    first, *rest = methods
    return any(set(first.tasks) & set(other.tasks) for other in rest)


def _returns(suite: Suite, found: statistics.Statistics) -> Table:
    """Returns a row for each task: each agent's mean with its interval, and published scores."""
    of_tasks = {(one.method, one.tasks[0]): one for one in found.of_tasks}
    names = [method.name for method in found.methods]
    rows = []
    for task in suite.tasks:
        cells = []
        for name in names:
            one = of_tasks.get((name, task.name))
            cells.append("" if one is None else _mean(one))
        published = [reference.scores.get(task.name) for reference in suite.references]
        cells += [
            "" if score is None else _number(_in_returns(reference, score, task.range))
            for reference, score in zip(suite.references, published, strict=True)
        ]
        if any(cells):
            rows.append([task.name, *cells])
    return ("task", *names, *(reference.name for reference in suite.references)), rows


def _mean(one: statistics.Estimates) -> str:
    interval = one.values["mean"]
    digits = 1 if max(map(abs, interval)) >= 10 else 3
    shown = tables.text_of(interval, digits) if one.runs > 1 else f"{interval[0]:,.{digits}f}"
    return f"{shown} ({one.runs} {'runs' if one.runs > 1 else 'run'})"


def _in_returns(reference: Reference, score: float, ends: tuple[float, float] | None) -> float:
    if reference.unit == "return" or ends is None:
        return score
    low, high = ends
    return low + score * (high - low)


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.3g}"


def _of(reference: Reference) -> str:
    scaled = " Its normalised scores are given as returns." if reference.unit == "score" else ""
    return f"{reference.name}: {_linked(reference.source)}; {reference.protocol}.{scaled}"


def _linked(text: str) -> str:
    """Returns text whose addresses are links."""
    words = (
        f"<{word.rstrip(';,')}>{word[len(word.rstrip(';,')) :]}" if "://" in word else word
        for word in text.split(" ")
    )
    return " ".join(words)


def _bands(rows: Sequence[Found]) -> str:
    columns = ("agent, task", "area", "its band", "greedy return", "at least", "")
    cells = [
        [
            row.name,
            f"{row.area:,.4g}",
            f"{row.band.area[0]:,.4g} to {row.band.area[1]:,.4g}",
            f"{row.final:,.4g}",
            f"{row.band.final:,.4g}",
            "within" if row.is_within else "outside",
        ]
        for row in rows
    ]
    return f"## Bands\n\n{tables.markdown((columns, cells))}"
