"""The part of a page whose suite scores experiments by tags: tables, and a chart of the tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlstack.programs.study.benchmark import scores
from rlstack.programs.study.benchmark.records import Record
from rlstack.programs.study.benchmark.suites import Suite, Task
from rlstack.programs.tools import charts
from rlstack.programs.tools.report import tables
from rlstack.programs.tools.report.tables import Table

Scores = Mapping[str, Mapping[str, float]]  # by agent and task


def sections(suite: Suite, records: Sequence[Record]) -> tuple[list[str], dict[str, charts.Drawn]]:
    """Returns the parts of a page in Markdown, and its charts by the names of their files.

    Raises:
      ValueError: a run has no log of its episodes.
    """
    found = {
        record.agent: {
            task.name: scores.score(task, record.tasks[task.name].runs)
            for task in suite.tasks
            if task.name in record.tasks and record.tasks[task.name].runs
        }
        for record in records
    }
    by_tag = {agent: _by_tag(suite, own) for agent, own in found.items()}
    title, name = f"{suite.title}, scores by tag", f"{suite.name}/tags.svg"
    axes = [tag for tag in suite.tags if all(tag in own for own in by_tag.values())]
    shapes = [(agent, [own[tag] for tag in axes]) for agent, own in by_tag.items()]
    radar = charts.Radar(title, [suite.tags[tag] for tag in axes], shapes, range(len(shapes)))
    parts = ["## Scores by tag\n", tables.markdown(_of_tags(suite, by_tag)), ""]
    parts += ["The score of a tag is the mean of the experiments that have it.\n"]
    parts += [f"![{title}]({name})\n", "## Scores by experiment\n"]
    parts += [tables.markdown(_of_tasks(suite, records, found)), ""]
    parts += [
        "The second number of a cell is that of runs, the settings with their seeds. Behind it is "
        "the mean number of episodes where that is less than the experiment's.\n"
    ]
    absent = [
        t.name for t in suite.tasks if t.files and not any(t.name in f for f in found.values())
    ]
    if absent:
        files = sorted({name for task in suite.tasks for name in task.files})
        parts += [
            f"{', '.join(absent)} did not run, because no data was there: they need "
            f"{' and '.join(f'`{name}`' for name in files)}. No score counts them.\n"
        ]
    if suite.notes:
        parts += ["## What differs from the original\n", *(f"- {n}" for n in suite.notes), ""]
    return parts, {name: radar}


def _by_tag(suite: Suite, found: Mapping[str, float]) -> dict[str, float]:
    values = {
        tag: [found[task.name] for task in suite.tasks if tag in task.tags and task.name in found]
        for tag in suite.tags
    }
    return {tag: float(np.mean(of_tag)) for tag, of_tag in values.items() if of_tag}


def _of_tags(suite: Suite, by_tag: Scores) -> Table:
    rows = []
    for tag, shown in suite.tags.items():
        number = sum(tag in task.tags for task in suite.tasks)
        cells = [_text(own.get(tag)) for own in by_tag.values()]
        rows.append([shown, str(number), *cells])
    return ("tag", "experiments", *by_tag), rows


def _of_tasks(suite: Suite, records: Sequence[Record], found: Scores) -> Table:
    rows = []
    for task in suite.tasks:
        cells = []
        for record in records:
            value = found[record.agent].get(task.name)
            cells.append("" if value is None else f"{_text(value)} {_runs(task, record)}")
        tags = ", ".join(suite.tags[tag] for tag in task.tags)
        rows.append([task.name, tags, f"{task.episodes:,}", *cells])
    return ("experiment", "tags", "episodes", *found), rows


def _runs(task: Task, record: Record) -> str:
    """Returns the number of runs, and the mean number of episodes if it is too small."""
    runs = record.tasks[task.name].runs
    mean = float(np.mean([scores.episodes(task, run) for run in runs]))
    short = f"; {mean:,.0f} episodes" if mean < task.episodes else ""
    return f"({len(runs)}{short})"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
