"""Trains the runs of a study: in one compiled program, one after the other, or in processes.

A run that fails is reported and does not end the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rlstack.programs.config.env_config import Option
from rlstack.programs.run import train as single
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_config import BUDGETS, read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.study import vmapped
from rlstack.programs.study.processes import Launch, Processes, here
from rlstack.programs.study.study import Study, Trial


class Work(NamedTuple):
    """A study that a command trains, and how it trains."""

    study: Study
    root: Path  # the absolute path of its directory
    out: TextIO  # receives a line for each event
    jobs: int = 1  # number of processes at the same time
    launch: Launch | None = None  # starts processes; None for this machine

    @property
    def is_here(self) -> bool:
        """Whether this process trains the runs."""
        return self.jobs == 1 and self.launch is None

    @property
    def processes(self) -> Processes:
        """The processes of this command, none of which has started."""
        return Processes(self.launch or here)

    def say(self, text: str) -> None:
        """Prints a line."""
        print(text, file=self.out, flush=True)


def train(work: Work, trials: Sequence[Trial], budgets: Mapping[str, Any]) -> Iterator[Trial]:
    """Trains runs or continues them; yields each trial once it has ended.

    Args:
      work: the study.
      trials: its trials, each of which is a run.
      budgets: new budgets, by the name of the config field.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; everything is saved.
    """
    if not work.is_here:
        yield from _in_processes(work, trials, budgets)
        return
    for group, traced in _groups(work, trials):
        yield from _train_group(work, group, traced, budgets)


def open_run(
    work: Work, trial: Trial, budgets: Mapping[str, Any]
) -> contextlib.AbstractContextManager[single.Opened]:
    """Claims the directory of a run, which may have begun, have finished, or be new.

    A run has at least the budgets of the study, which an earlier command may have raised.
    """
    path = work.root / trial.name
    experiment = work.study.experiment(trial.values, trial.seed)
    if RunDir(path).config.is_file():
        own = read_config(RunDir(path), several=True)
        both = {name: (getattr(own, name), getattr(experiment, name)) for name in BUDGETS}
        raised = {k: new for k, (old, new) in both.items() if old and (new > old or not new)}
        return single.earlier_run(path, {**raised, **budgets}, may_restart=True)
    return single.new_run(dataclasses.replace(experiment, **budgets), path)


def display_of(work: Work, opened: Sequence[single.Opened]) -> ProgressDisplay:
    """Returns the display of the joint progress of several runs."""
    experiments = [run.experiment for run in opened]
    return ProgressDisplay(
        sum(experiment.frames for experiment in experiments),
        work.out,
        start_frames=sum(Progress.of(run.start_from).env_frames for run in opened),
        shows_progress="terminal" in experiments[0].loggers,
    )


def may_share_a_program(study: Study) -> bool:
    """Whether one compiled program can train runs of a study that differ in their seeds."""
    base = study.base
    return base.layout.is_compiled and not (base.data or base.learner.devices or base.policies)


def _in_processes(
    work: Work, trials: Sequence[Trial], budgets: Mapping[str, Any]
) -> Iterator[Trial]:
    by_name = {trial.name: trial for trial in trials}
    waiting, processes = iter(by_name), work.processes

    def start_next() -> bool:
        if (name := next(waiting, None)) is None:
            return False
        log = work.root / "logs" / name
        processes.start(name, log, work.root, name, budgets)
        work.say(f"{name}: started; its output is in {log}")
        return True

    for name, failure in processes.run(work.jobs, start_next):
        directory = RunDir(work.root / name)
        directory.fetch()
        result = None if failure else read_result(directory)
        yield by_name[name].ended(result or failure or "it left no result")


def _groups(work: Work, trials: Sequence[Trial]) -> Iterator[tuple[list[Trial], list[str]]]:
    """Yields the runs that one program trains, and the options that it traces."""
    study = work.study
    if len(trials) == 1 or not may_share_a_program(study):
        yield from (([trial], []) for trial in trials)
        return
    varied = [name for name in study.values if len({repr(t.values[name]) for t in trials}) > 1]
    traced = [name for name in varied if vmapped.can_trace(study.base, name, study.values[name])]
    compiled = [name for name in varied if name not in traced]
    same = ["the seed", *traced]
    text = f"{len(trials)} runs; one program trains those that differ in {', '.join(same)} only"
    if compiled:
        text += f"; there is one for each value of {', '.join(compiled)}"
    work.say(f"{text}.")

    def program(trial: Trial) -> list[Option]:
        return [trial.values[name] for name in compiled]

    for _, group in itertools.groupby(sorted(trials, key=lambda t: repr(program(t))), program):
        yield list(group), traced


def _train_group(
    work: Work, group: Sequence[Trial], traced: Sequence[str], budgets: Mapping[str, Any]
) -> Iterator[Trial]:
    """Trains runs in one program, or a single one."""
    with contextlib.ExitStack() as stack:
        runs: list[tuple[Trial, single.Opened]] = []
        for trial in group:
            try:
                opened = stack.enter_context(open_run(work, trial, budgets))
            except Interrupted:
                raise
            except Exception as error:  # such as of a directory that another command has
                yield trial.ended(error)
                continue
            if opened.result is not None:
                yield trial.ended(opened.result)
            else:
                runs.append((trial, opened))
        if not runs:
            return
        values = {name: [trial.values[name] for trial, _ in runs] for name in traced}
        outcomes = _outcomes(work, [opened for _, opened in runs], values)
        for (trial, _), outcome in zip(runs, outcomes, strict=True):
            yield trial.ended(outcome)


def _outcomes(
    work: Work, opened: Sequence[single.Opened], values: Mapping[str, Sequence[Option]]
) -> Sequence[Result | Exception]:
    """Trains runs in one program; an error of the program is that of each of them."""
    try:
        if len(opened) == 1:
            return [single.train_opened(opened[0], work.out)]
        with display_of(work, opened) as display:
            return vmapped.train(opened, values, display)
    except Interrupted:
        raise
    except Exception as error:
        return [error] * len(opened)
