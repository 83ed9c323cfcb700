"""Finished runs, and the methods and tasks that a report divides them into."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import PRESETS, preset
from rlstack.programs.program.failures import cause, read_failures
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_config import options_of, read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.report import By
from rlstack.programs.tools.status.runs import RunReader
from rlstack.storage import jsonl

_EVALUATION, _TRAINING = "evaluator/episode_return", "actor/episode_return"
# The log of a curve is the first of these with so many points: two evaluations, of which the last
# is at the end, say less of a short run than its training does.
_CURVES = ((_EVALUATION, 3), (_TRAINING, 2), (_EVALUATION, 2), (_TRAINING, 0))

_REASON = 120  # characters of the reason of a failure


class Run(NamedTuple):
    """A finished run."""

    experiment: Experiment
    result: Result
    frames: np.ndarray  # [N]
    returns: np.ndarray  # [N] of training episodes that ended near these frames, or evaluations
    restarts: int  # restarts of nodes
    lost_frames: int  # frames of lost nodes that never reached the learner

    @property
    def agent(self) -> str:
        """The name of the agent."""
        return _agent(self.experiment)

    @property
    def environment(self) -> str:
        """The name of the environment, without its module."""
        return _environment(self.experiment)

    @property
    def task(self) -> str:
        """The environment with its options."""
        return _task(self.experiment)

    @property
    def is_known(self) -> bool:
        """Whether the preset is one of rlstack's, so that its name says all options."""
        return self.result.preset in PRESETS

    @property
    def changes(self) -> dict[str, Any]:
        """The run's options that differ from its preset, by name; the seed is not compared.

        If rlstack has no preset of this name, it is all options.
        """
        usual = options_of(preset(self.result.preset)) if self.is_known else {}
        own = options_of(self.experiment)
        usual["seed"] = own["seed"]
        return {
            name: value for name, value in own.items() if name not in usual or usual[name] != value
        }


class Unfinished(NamedTuple):
    """A run without a result: it runs, was stopped, failed, or has not begun."""

    source: str  # the directory that was named
    name: str  # the preset's name, and the values of varied options
    path: Path
    experiment: Experiment

    @property
    def task(self) -> str:
        """The environment with its options."""
        return _task(self.experiment)

    @property
    def state(self) -> str:
        """What became of it, such as "failed at 400 of 1,000 frames"."""
        if not RunDir(self.path).config.is_file():
            return "has not begun"
        status = RunReader(self.path).read()
        text = f"{status.state} at {status.frames:,} of {self.experiment.frames:,} frames"
        failure = cause(read_failures(RunDir(self.path).failures))
        if status.state == "failed" and failure is not None:
            text += f": {textwrap.shorten(str(failure['reason']), _REASON, placeholder=' ...')}"
        return text


class Group(NamedTuple):
    """Runs of one task that differ in their seeds only."""

    name: str  # the preset's name, and the values of varied options
    runs: Sequence[Run]  # the runs, sorted by seed

    @property
    def task(self) -> str:
        """The task of all runs."""
        return self.runs[0].task


class Method(NamedTuple):
    """The unit that a report compares: the runs of a preset, an agent or a directory."""

    name: str
    tasks: Mapping[str, Sequence[Run]]
    unfinished: Mapping[str, int] = MappingProxyType({})  # number of such runs, by task


def read(path: str | Path) -> Run:
    """Reads a run directory.

    Raises:
      ValueError: the directory holds no finished run.
    """
    directory = RunDir.open(path)
    experiment = read_config(directory, several=True)
    result = read_result(directory)
    if result is None:
        raise ValueError(
            f"{path} must hold a finished run; its result.json is missing or of "
            f"another version. Finish the run with rlstack train --resume {path}."
        )
    # Without the logger jsonl there are no metrics, and so no curve.
    lines = jsonl.read_logs(directory.metrics) if directory.metrics.exists() else []
    for curve, least in _CURVES:
        points = [(line["env_frames"], line[curve]) for line in lines if curve in line]
        if len(points) >= least:
            break
    frames, returns = np.array(points, float).reshape((-1, 2)).T
    restarts, lost = (_newest(lines, f"program/{name}") for name in ("restarts", "lost_frames"))
    return Run(experiment, result, frames, returns, restarts, lost)


def read_groups(name: str, paths: Sequence[str | Path]) -> list[Group]:
    """Reads the runs of one preset and values, and divides them by task.

    Raises:
      ValueError: a directory holds no finished run, or two of one task have the same seed.
    """
    tasks: dict[str, list[Run]] = {}
    for run in sorted(map(read, paths), key=lambda run: (run.task, run.result.seed)):
        tasks.setdefault(run.task, []).append(run)
    for runs in tasks.values():
        seeds = [run.result.seed for run in runs]
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"each seed of a preset must occur once; got {name} with seeds "
                f"{', '.join(map(str, seeds))}. Name one directory for each seed."
            )
    return [Group(name, runs) for runs in tasks.values()]


def methods(
    sources: Mapping[str, Sequence[Group]], by: By, unfinished: Sequence[Unfinished] = ()
) -> list[Method]:
    """Divides groups of runs into methods.

    Args:
      sources: the groups of each directory.
      by: the property that the groups of a method share: their name (preset), agent, or directory.
      unfinished: the runs without a result, which are counted.

    Raises:
      ValueError: a method would have two groups of one task.
    """
    found: dict[str, dict[str, Group]] = {}
    for directory, groups in sources.items():
        for group in groups:
            task = group.task
            method = _method(by, group.name, group.runs[0].experiment, directory)
            earlier = found.setdefault(method, {}).setdefault(task, group)
            if earlier is not group:
                raise ValueError(
                    f"a method must have one group of runs of each task; got {method} with "
                    f"{earlier.name} and {group.name}, which are both of {task}. Name fewer "
                    "directories, or divide the runs in another way: --by preset, agent or "
                    "directory."
                )
    missing = Counter(
        (_method(by, one.name, one.experiment, one.source), one.task) for one in unfinished
    )
    return [
        Method(
            name,
            {task: tasks[task].runs for task in sorted(tasks)},
            {task: missing[name, task] for task in sorted(tasks)},
        )
        for name, tasks in found.items()
    ]


def _method(by: By, name: str, experiment: Experiment, directory: str) -> str:
    return {"preset": name, "agent": _agent(experiment), "directory": directory}[by]


def _agent(experiment: Experiment) -> str:
    return type(experiment.agent).__name__.removesuffix("Config")


def _environment(experiment: Experiment) -> str:
    return experiment.env.name.rsplit(":")[-1]


def _task(experiment: Experiment) -> str:
    name = _environment(experiment)
    options = ", ".join(f"{k}={v}" for k, v in sorted(experiment.env.options.items()))
    return f"{name} ({options})" if options else name


def _newest(lines: Sequence[Mapping[str, float]], name: str) -> int:
    """Returns the last value of a log; 0 if no line contains it."""
    values = (line[name] for line in reversed(lines) if name in line)
    return next((int(value) for value in values if np.isfinite(value)), 0)
