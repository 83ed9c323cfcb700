"""Trains a study, resumes it, and reports on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run import train as single
from rlstack.programs.session.display import lasting
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir, RunDirError, fetched, new_directory
from rlstack.programs.study import executors, optuna, pbt, report
from rlstack.programs.study.executors import Work
from rlstack.programs.study.processes import Launch
from rlstack.programs.study.study import (
    FailedTrialsError,
    PbtConfig,
    SearchConfig,
    Study,
    Trial,
    read,
)

_ROOT = Path("runs")


def run(
    study: Study,
    directory: str | Path | None = None,
    *,
    jobs: int = 1,
    launch: Launch | None = None,
    reports: bool = True,
    stream: TextIO | None = None,
) -> list[Trial]:
    """Trains all trials of a study, each in a directory of its own, and writes a report.

    Args:
      study: the study.
      directory: a new or empty directory for the study; by default a new one under ``runs/``.
      jobs: the number of processes that train at the same time. With 1, this process trains the
        runs of a grid and of a population: those of the topology fused together where that is
        possible, others one after the other. The trials of a search are always processes.
      launch: starts processes, also for one job; by default `processes.here`.
      reports: True to write a report.
      stream: receives the progress display, a line for each event, and the table; standard error by
        default.

    Returns:
      All trials, in the order of their numbers; those of a grid in the order in which they ended.

    Raises:
      ValueError: an option does not exist or does not take a value, or a config contradicts itself.
      FailedTrialsError: trials of a grid or a population failed, or all those of a search.
      Interrupted: SIGINT or SIGTERM was received; `resume` continues.
    """
    work = Work(study, Path(), lasting(stream), jobs, launch)
    _check_jobs(jobs)
    if work.is_here and not isinstance(study.scheduler, SearchConfig):
        _check(_experiments(study))
    work = work._replace(root=create(study, directory))
    if isinstance(study.scheduler, SearchConfig):  # which other commands may join
        return _train(work, {}, reports=reports)
    with RunDir(work.root).claimed():
        return _train(work, {}, reports=reports)


def create(study: Study, directory: str | Path | None = None) -> Path:
    """Makes the directory of a study for `resume`; arguments and errors are those of `run`."""
    base, scheduler, word = study.base, study.scheduler, "set"
    _experiments(study)  # all configs are checked before anything is written
    if isinstance(scheduler, PbtConfig):
        word = "population"
        study = dataclasses.replace(study, scheduler=pbt.with_period(study))
        if "jsonl" not in base.loggers:  # its lines have the scores
            base = dataclasses.replace(base, loggers=(*base.loggers, "jsonl"))
            study = dataclasses.replace(study, base=base)
    elif isinstance(scheduler, SearchConfig):
        word = "sweep"
    if directory is None:
        directory = new_directory(_ROOT, f"{base.preset}-{word}")
    if isinstance(scheduler, SearchConfig) and RunDir.at(directory).is_stored:
        raise RunDirError(
            "Study: the directory of a search must be on a file system, because its commands share "
            f"a database there; got {directory}. Grids and populations may be in object stores."
        )
    made = RunDir.create(directory, base.preset, base.seed)
    with made.claimed():
        if isinstance(scheduler, SearchConfig):
            optuna.Database(study, made.path)
        study.write(made.path)
    return made.path


def resume(
    directory: str | Path,
    budgets: Mapping[str, Any] | None = None,
    *,
    trials: int | None = None,
    jobs: int = 1,
    launch: Launch | None = None,
    part: tuple[int, int] = (1, 1),
    reports: bool = True,
    stream: TextIO | None = None,
) -> list[Trial]:
    """Continues a study that was interrupted, or that has finished and gets a new budget.

    Finished runs stay as they are, interrupted runs continue from their newest checkpoints, and the
    other runs start. Several commands may work on a search, or on different parts of a grid, at the
    same time, on all machines that see the directory.

    Args:
      directory: the directory of the study.
      budgets: new budgets of all runs of a grid or a population, by name: frames, updates or hours.
      trials: a new number of trials of a whole search; unchanged by default.
      jobs: see `run`.
      launch: see `run`.
      part: (K, N) to train only each N-th run of a grid, from run K on, which counts from 1.
      reports: True to write a report.
      stream: see `run`.

    Raises:
      ValueError: there is no such study, or one of the reasons of `run`.
    """
    _check_jobs(jobs)
    budgets = budgets or {}
    directory = fetched(Path(directory))
    study = read(directory).with_budgets(budgets, trials)
    work = Work(study, directory.absolute(), lasting(stream), jobs, launch)
    first, every = part
    if not 1 <= first <= every:
        raise ValueError(f"Study: a part must be like 1/4, from 1/4 to 4/4; got {first}/{every}.")
    if every > 1 and not study.is_grid:
        raise ValueError(
            "Study: a part (--task) is for grids; commands that resume a search share its trials."
        )
    if isinstance(study.scheduler, SearchConfig) or every > 1:
        if trials is not None:
            study.write(work.root)
        return _train(work, budgets, part, reports)  # each trial has a claim of its own
    with RunDir(work.root).claimed():
        study.write(work.root)
        return _train(work, budgets, part, reports)


def train_run(directory: str | Path, name: str, budgets: Mapping[str, Any]) -> Result:
    """Trains or continues one run of a study, in this process."""
    study = read(directory)
    trial = Trial(name, {})
    if study.is_grid:
        (trial,) = (trial for trial in study.trials() if trial.name == name)
    work = Work(study, Path(directory), lasting())
    with executors.open_run(work, trial, budgets) as opened:
        return opened.result or single.train_opened(opened)


def _check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise ValueError(f"Study: jobs must be at least 1; got {jobs}.")


def _experiments(study: Study) -> list[Experiment]:
    """Returns the experiments with which the runs begin; none for a search."""
    if isinstance(study.scheduler, SearchConfig):
        return []
    trials = study.trials() if study.is_grid else pbt.Lineage.new(study).members(study)
    return [study.experiment(trial.values, trial.seed) for trial in trials]


def _check(experiments: Sequence[Experiment]) -> None:
    """Checks experiments as each of their runs does, and that their environments can be made.

    Those that differ in the seed only are checked once. It is for runs of this process: others may
    run on other hosts, and this one would take memory of the accelerator that they need.

    Raises:
      ValueError: a config contradicts itself, the environment or this machine.
    """
    checked: list[Experiment] = []
    for experiment in experiments:
        experiment = dataclasses.replace(experiment, seed=experiments[0].seed)
        if experiment not in checked:
            resolved = single.checked(experiment)
            if all(experiment.env != other.env for other in checked):
                environment_spec(resolved)
            checked.append(experiment)


def _train(
    work: Work,
    budgets: Mapping[str, Any],
    part: tuple[int, int] = (1, 1),
    reports: bool = True,
) -> list[Trial]:
    study, is_search = work.study, isinstance(work.study.scheduler, SearchConfig)
    if is_search:
        trials = optuna.search(work)
    elif study.is_grid:
        trials = []
        first, every = part
        for trial in executors.train(work, study.trials()[first - 1 :: every], budgets):
            work.say(f"{trial.name}: {_text(trial)}")
            trials.append(trial)
    else:
        trials = pbt.train(work, budgets)
    failed = [trial for trial in trials if trial.state == "failed"]
    if reports:
        _report(work, trials, have_failed=bool(failed))
    if is_search and not any(trial.state == "complete" for trial in trials):
        newest = [f" Trial {trial.number}: {trial.error}" for trial in failed if trial.error][-1:]
        raise FailedTrialsError(f"None of {len(trials)} trials is complete.{''.join(newest)}")
    if failed and not is_search:
        errors = "\n".join(f"{trial.name}: {trial.error}" for trial in failed)
        raise FailedTrialsError(
            f"{len(failed)} of {len(trials)} runs failed. rlstack train --resume {work.root} tries "
            f"them again.\n{errors}"
        )
    return trials


def _text(trial: Trial) -> str:
    result = trial.result
    if result is None:
        return f"failed: {trial.error.splitlines()[0] if trial.error else ''}"
    return (
        f"evaluation return {result.eval_return_mean:.1f} after {result.env_frames:,} frames in "
        f"{result.wall_seconds:.1f} s; ended by {result.ended_by}"
    )


def _report(work: Work, trials: Sequence[Trial], *, have_failed: bool) -> None:
    """Writes the report. If trials failed, prints its error, because theirs matter more."""
    try:
        if text := report.write(work.study, work.root, trials):
            work.say(text)
    except Exception as error:
        if not have_failed:
            raise
        work.say(f"there is no new report: {type(error).__name__}: {error}")
