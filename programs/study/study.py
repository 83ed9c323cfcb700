"""Trains a set of runs, resumes it, and reports on it.

A run that fails is reported and does not end the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run import train
from rlstack.programs.session.display import ProgressDisplay, lasting
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir, new_directory
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.study import executors, loops, together, trials
from rlstack.programs.study.trials import FailedRunsError, Member, RunSet
from rlstack.programs.tools.report import report, tables

_ROOT = Path("runs")


class Ended(NamedTuple):
    """A run of a set that has ended."""

    member: Member
    path: Path  # the run directory
    result: Result | None  # None if it failed
    error: str = ""


class Part(NamedTuple):
    """Every ``total``-th run of a set, from the ``number``-th on, which counts from 1."""

    number: int = 1
    total: int = 1

    def of(self, members: Sequence[Member]) -> list[Member]:
        """Returns the runs that belong to the part.

        Raises:
          ValueError: there is no such part.
        """
        if not 1 <= self.number <= self.total:
            raise ValueError(
                f"Set of runs: a part must be like 1/4, from 1/4 to 4/4; got {self.number}/"
                f"{self.total}."
            )
        return list(members[self.number - 1 :: self.total])


ALL = Part()


def run(
    run_set: RunSet,
    directory: str | Path | None = None,
    *,
    jobs: int = 1,
    launch: executors.Launch | None = None,
    stream: TextIO | None = None,
) -> list[Ended]:
    """Trains all runs of a set, each in a directory of its own, and writes a report.

    Args:
      run_set: the runs.
      directory: a new or empty directory for the set; by default a new one under ``runs/``.
      jobs: the number of processes that train at the same time. With 1, this process trains: runs
        of the topology fused together where that is possible, others one after the other.
      launch: starts processes, also for one job; by default `executors.here`.
      stream: receives the progress display; standard error by default.

    Raises:
      ValueError: an option does not exist or does not take a value, or a config contradicts itself.
      FailedRunsError: some runs failed, and the others have finished.
      Interrupted: SIGINT or SIGTERM was received; `resume` continues.
    """
    executors.check_jobs(jobs)
    if jobs == 1 and launch is None:
        check([member.experiment for member in run_set.members()])
    path = create(run_set, directory)
    with RunDir(path).claimed():
        return _train(run_set, path, {}, jobs, stream, launch)


def create(run_set: RunSet, directory: str | Path | None = None) -> Path:
    """Makes the directory of a set for `resume`; arguments and errors are those of `run`."""
    run_set.members()  # all configs are checked before anything is written
    if directory is None:
        directory = new_directory(_ROOT, f"{run_set.base.preset}-set")
    made = RunDir.create(directory, run_set.base.preset, run_set.base.seed)
    with made.claimed():
        run_set.write(made.path)
    return made.path


def resume(
    directory: str | Path,
    budgets: Mapping[str, Any] | None = None,
    *,
    jobs: int = 1,
    launch: executors.Launch | None = None,
    part: Part = ALL,
    reports: bool = True,
    stream: TextIO | None = None,
) -> list[Ended]:
    """Continues a set of runs that was interrupted, or whose runs have finished.

    Finished runs stay as they are, interrupted runs continue from their newest checkpoints, and the
    other runs start.

    Args:
      directory: the directory of the set.
      budgets: new budgets of all runs, by name: frames, updates or hours.
      jobs: see `run`.
      launch: see `run`.
      part: the part of the runs to train. Several commands may train different parts of a set at
        the same time.
      reports: True to write a report.
      stream: see `run`.

    Raises:
      ValueError: there is no such set, or one of the reasons of `run`.
    """
    executors.check_jobs(jobs)
    run_set, budgets = trials.read(directory), budgets or {}
    if budgets:
        run_set = dataclasses.replace(run_set, base=dataclasses.replace(run_set.base, **budgets))
    path = Path(directory).absolute()
    if part != ALL:  # each run has a claim of its own
        return _train(run_set, path, budgets, jobs, stream, launch, part, reports)
    with RunDir(path).claimed():
        run_set.write(path)
        return _train(run_set, path, budgets, jobs, stream, launch, part, reports)


def check(experiments: Sequence[Experiment]) -> None:
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
            resolved = train.checked(experiment)
            if all(experiment.env != other.env for other in checked):
                environment_spec(resolved)
            checked.append(experiment)


def train_one(directory: str | Path, name: str, budgets: Mapping[str, Any]) -> Result:
    """Trains or continues one run of a set, in this process."""
    path = Path(directory) / name
    if RunDir(path).config.is_file():
        opening = train.earlier_run(path, budgets, may_restart=True)
    else:
        (member,) = (m for m in trials.read(directory).members() if m.name == name)
        opening = train.new_run(dataclasses.replace(member.experiment, **budgets), path)
    with opening as opened:
        return opened.result or train.train_opened(opened)


def _train(
    run_set: RunSet,
    root: Path,
    budgets: Mapping[str, Any],
    jobs: int,
    stream: TextIO | None,
    launch: executors.Launch | None,
    part: Part = ALL,
    reports: bool = True,
) -> list[Ended]:
    out = lasting(stream)
    members = part.of(run_set.members())
    ended: list[Ended] = []

    def take(member: Member, outcome: Result | str) -> None:
        path = root / member.name
        if isinstance(outcome, str):
            one = Ended(member, path, None, outcome)
        else:
            one = Ended(member, path, outcome)
        ended.append(one)
        print(f"{member.name}: {_text(one)}", file=out, flush=True)

    if jobs > 1 or launch is not None:
        names = [member.name for member in members]
        by_name = {member.name: member for member in members}
        for name, failure in executors.run(
            root, names, budgets, jobs, out, launch or executors.here
        ):
            result = None if failure else read_result(RunDir(root / name))
            take(by_name[name], result or failure or "it left no result")
    else:
        for group, traced in _groups(run_set, members, out):
            for member, outcome in _train_group(root, group, traced, budgets, out):
                take(member, outcome)
    failed = [one for one in ended if one.result is None]
    if reports:
        with reporting(out, have_failed=bool(failed)):
            _report(root, out)
    if failed:
        errors = "\n".join(f"{one.member.name}: {one.error}" for one in failed)
        raise FailedRunsError(
            f"{len(failed)} of {len(ended)} runs failed. rlstack train --resume {root} tries them "
            f"again.\n{errors}"
        )
    return ended


@contextlib.contextmanager
def reporting(out: TextIO, *, have_failed: bool) -> Iterator[None]:
    """Prints an error of the report instead of raising it if runs failed: their errors matter more.

    Args:
      out: receives the error.
      have_failed: True if runs failed.
    """
    try:
        yield
    except Exception as error:
        if not have_failed:
            raise
        print(f"there is no new report: {_described(error)}", file=out, flush=True)


def _text(one: Ended) -> str:
    if one.result is None:
        return f"failed: {one.error.splitlines()[0] if one.error else ''}"
    return (
        f"greedy return {one.result.eval_return_mean:.1f} after {one.result.env_frames:,} frames "
        f"in {one.result.wall_seconds:.1f} s; ended by {one.result.ended_by}"
    )


def _groups(
    run_set: RunSet, members: Sequence[Member], out: TextIO
) -> Iterator[tuple[list[Member], list[str]]]:
    """Yields the runs that one program trains, and the options that it traces."""
    base = run_set.base
    alone = not base.layout.is_compiled or base.data or base.learner.devices or base.policies
    if alone or len(members) == 1:
        yield from (([member], []) for member in members)
        return
    varied = [name for name, values in run_set.vary.items() if len(values) > 1]
    traced = [name for name in varied if loops.can_trace(base, name, run_set.vary[name])]
    compiled = [name for name in varied if name not in traced]
    same = ["the seed", *traced]
    text = f"{len(members)} runs; one program trains those that differ in {', '.join(same)} only"
    if compiled:
        text += f"; there is one for each value of {', '.join(compiled)}"
    print(f"{text}.", file=out, flush=True)

    def program(member: Member) -> list[Option]:
        return [member.values[name] for name in compiled]

    for _, group in itertools.groupby(sorted(members, key=lambda m: repr(program(m))), program):
        yield list(group), traced


def _train_group(
    root: Path,
    group: Sequence[Member],
    traced: Sequence[str],
    budgets: Mapping[str, Any],
    out: TextIO,
) -> Iterator[tuple[Member, Result | str]]:
    """Trains runs in one program, or a single one; yields what came of them."""
    with contextlib.ExitStack() as stack:
        runs = []
        for member in group:
            try:
                opened = stack.enter_context(_opened(root, member, budgets))
            except Interrupted:
                raise
            except Exception as error:  # such as of a directory that another command has
                yield member, _described(error)
                continue
            if opened.result is not None:
                yield member, opened.result
            else:
                runs.append((member, opened))
        if not runs:
            return
        if len(runs) == 1:
            yield runs[0][0], _one(runs[0][1], out)
            return
        values = {name: [member.values[name] for member, _ in runs] for name in traced}
        outcomes = _together([run for _, run in runs], values, out)
        for (member, _), outcome in zip(runs, outcomes, strict=True):
            yield member, _described(outcome)


def _described(outcome: Result | Exception) -> Result | str:
    """Returns a result as it is, and an error as text."""
    if isinstance(outcome, Exception):
        return f"{type(outcome).__name__}: {outcome}"
    return outcome


def _together(
    opened: Sequence[train.Opened], values: Mapping[str, Sequence[Option]], out: TextIO
) -> Sequence[Result | Exception]:
    """Trains runs in one program; an error of the program is that of each of them."""
    try:
        with _display(opened, out) as display:
            return together.train(opened, values, display)
    except Interrupted:
        raise
    except Exception as error:
        return [error] * len(opened)


def _one(opened: train.Opened, out: TextIO) -> Result | str:
    try:
        return train.train_opened(opened, out)
    except Interrupted:
        raise
    except Exception as error:
        return _described(error)


def _display(opened: Sequence[train.Opened], out: TextIO) -> ProgressDisplay:
    experiments: list[Experiment] = [run.experiment for run in opened]
    return ProgressDisplay(
        sum(experiment.frames for experiment in experiments),
        out,
        start_frames=sum(Progress.of(run.start_from).env_frames for run in opened),
        shows_progress="terminal" in experiments[0].loggers,
    )


@contextlib.contextmanager
def _opened(root: Path, member: Member, budgets: Mapping[str, Any]) -> Iterator[train.Opened]:
    """Claims the directory of a run, which may have begun, have finished, or be new."""
    path = root / member.name
    if RunDir(path).config.is_file():
        with train.earlier_run(path, budgets, may_restart=True) as opened:
            yield opened
    else:
        with train.new_run(dataclasses.replace(member.experiment, **budgets), path) as opened:
            yield opened


def _report(root: Path, out: TextIO) -> None:
    """Writes the report of the finished runs."""
    found = trials.finished(root)
    if found:
        pictures: report.Pictures = "png" if importlib.util.find_spec("matplotlib") else "none"
        path = root / "report.md"
        command = f"rlstack report {root.resolve().name}"  # a page has no paths of this machine
        made = report.make([("", found)])
        report.write_markdown(made, path, command, pictures)
        report.write_page(made, path.with_suffix(".html"), command)
        text = tables.markdown(tables.of_groups(made.groups))
        print(f"\n{text}\n\n{path}", file=out, flush=True)
