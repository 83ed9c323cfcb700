"""Scores of experiments that count all episodes of training, as bsuite's analysis defines them.

Osband et al. 2020, https://arxiv.org/abs/1908.03568; the rules are those of the functions ``score``
in the package bsuite 0.3.6, ``bsuite/experiments/*/analysis.py``, and of ``bsuite/utils/plotting``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlstack.programs.study.benchmark.records import Scored
from rlstack.programs.study.benchmark.suites import Score, Task

_FORGIVEN = 100  # episodes that Deep Sea may take beyond those of random actions, 2 ** size
_END = 0.9  # of the episodes, after which answers count for the accuracy


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
