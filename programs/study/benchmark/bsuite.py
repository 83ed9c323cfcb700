"""Scores of experiments that count all episodes of training, as bsuite's analysis defines them.

Osband et al. 2020, https://arxiv.org/abs/1908.03568; the rules are those of the functions ``score``
in the package bsuite 0.3.6, ``bsuite/experiments/*/analysis.py``, and of ``bsuite/utils/plotting``.
`sections` makes the part of a page that has these scores: tables, and a chart of the tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlstack.programs.study.benchmark.records import Record, Scored
from rlstack.programs.study.benchmark.suites import Score, Suite, Task
from rlstack.programs.tools import charts
from rlstack.programs.tools.report import tables
from rlstack.programs.tools.report.tables import Table

_FORGIVEN = 100  # episodes that Deep Sea may take beyond those of random actions, 2 ** size
_END = 0.9  # of the episodes, after which answers count for the accuracy

Scores = Mapping[str, Mapping[str, float]]  # by agent and task


def score(task: Task, runs: Sequence[Scored]) -> float:
    """Returns the score of an experiment from 0 to 1.

    Args:
      task: the experiment, which has a rule.
      runs: its finished runs. Those with fewer episodes than the experiment count with what they
        have, as in bsuite.

    Raises:
      ValueError: there is no run, or one has no log of its episodes.
    """
    rule = task.score
    if rule is None or not runs:
        raise ValueError(f"benchmark: {task.name} must have a rule and runs to be scored.")
    if any("regret" not in run.totals for run in runs):
        raise ValueError(
            f"benchmark: a run of {task.name} has no regret of its episodes in its logs. Train it "
            "with --loggers jsonl, and for more than one line of logs."
        )
    groups: dict[object, list[Scored]] = {}
    for run in runs:
        groups.setdefault(run.values.get(rule.by), []).append(run)
    found = [_of_group(task, rule, group) for group in groups.values()]
    mean = float(np.mean(found))
    return 0.5 * (mean + max(0.0, mean - float(np.std(found)))) if rule.bound else mean


def episodes(task: Task, run: Scored) -> float:
    """Returns the number of episodes of a run that count."""
    last = run.totals["episodes"][-1]
    return min(last, task.episodes) if task.episodes else last


def _of_group(task: Task, rule: Score, runs: Sequence[Scored]) -> float:
    if rule.rule == "found":
        return float(np.mean([_is_found(task, rule, run) for run in runs]))
    regret = float(np.mean([_mean(run, "regret", episodes(task, run), 0.0) for run in runs]))
    if rule.rule == "below":
        return float(regret < rule.limit)
    left = min(max((rule.limit - regret) / rule.limit, 0.0), 1.0)
    if rule.rule == "accuracy":
        right = [1 - _mean(run, "regret", episodes(task, run), _END) / 2 for run in runs]
        return 0.5 * (left + float(np.mean(right)))
    if rule.solves:
        solved = [_mean(run, "solved", episodes(task, run), 0.0) > 0 for run in runs]
        return 0.5 * (left + float(np.mean(solved)))
    return left


def _mean(run: Scored, name: str, end: float, begin: float) -> float:
    """Returns the mean of a number over the episodes up to one, from a share of these on."""
    at = np.array([0.0, *run.totals["episodes"]])
    sums = np.array([0.0, *run.totals[name]])
    first, last = np.interp([begin * end, end], at, sums)
    return float(last - first) / (end - begin * end)


def _is_found(task: Task, rule: Score, run: Scored) -> bool:
    """Whether enough episodes were good, before random actions would have found the treasure."""
    size = int(run.values["env.options.size"])
    for at, bad in zip(run.totals["episodes"], run.totals["regret"], strict=True):
        if rule.after <= at <= episodes(task, run) and bad / at < rule.limit:
            return at < 2**size + _FORGIVEN
    return False


def sections(suite: Suite, records: Sequence[Record]) -> tuple[list[str], dict[str, charts.Drawn]]:
    """Returns the parts of a page in Markdown, and its charts by the names of their files.

    Raises:
      ValueError: a run has no log of its episodes.
    """
    found = {
        record.agent: {
            task.name: score(task, record.tasks[task.name].runs)
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
    mean = float(np.mean([episodes(task, run) for run in runs]))
    short = f"; {mean:,.0f} episodes" if mean < task.episodes else ""
    return f"({len(runs)}{short})"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
