"""Trains the trials of a sweep in processes, and ends unpromising trials early.

A trial that fails is reported and does not end the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from rlstack.programs.session.display import lasting
from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir, new_directory
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.programs.study import report
from rlstack.programs.study import sweep as sweeps
from rlstack.programs.study import trials as sets
from rlstack.programs.study.executors import Jobs, Launch, here
from rlstack.programs.study.optuna import Row, Study, Trial
from rlstack.programs.study.sweep import Sweep
from rlstack.programs.study.trials import RunSet
from rlstack.storage import jsonl

_ROOT = Path("runs")
_PERIOD = 0.2  # seconds between two looks at the processes and their evaluations
_RETURN = "evaluator/episode_return"


class NoTrialError(RuntimeError):
    """No trial of a sweep is complete; the message has the error of one."""


def run(
    sweep: Sweep,
    directory: str | Path | None = None,
    *,
    jobs: int = 1,
    launch: Launch = here,
    stream: TextIO | None = None,
) -> list[Row]:
    """Searches, and writes a report.

    Args:
      sweep: the sweep: an experiment and the options to search.
      directory: a new or empty directory; by default a new one under ``runs/``.
      jobs: the number of trials that train at the same time, each in a process.
      launch: starts the processes.
      stream: receives a line for each event, and the table; standard error by default.

    Returns:
      All trials, in their order.

    Raises:
      ValueError: see `rlstack.programs.study.optuna.Study`, or the directory is not empty.
      NoTrialError: no trial is complete.
      Interrupted: SIGINT or SIGTERM was received; `resume` continues.
    """
    return resume(create(sweep, directory), jobs=jobs, launch=launch, stream=stream)


def create(sweep: Sweep, directory: str | Path | None = None) -> Path:
    """Makes the directory of a sweep, and its study; arguments and errors are those of `run`."""
    if directory is None:
        directory = new_directory(_ROOT, f"{sweep.base.preset}-sweep")
    path = RunDir.create(directory, sweep.base.preset, sweep.base.seed).path
    Study(sweep, path)
    sweep.write(path)
    return path


def resume(
    directory: str | Path,
    trials: int | None = None,
    *,
    jobs: int = 1,
    launch: Launch = here,
    stream: TextIO | None = None,
) -> list[Row]:
    """Continues a sweep until it has all trials.

    Several commands may work on a sweep at the same time, on all machines that see its directory.
    Unfinished trials of a command that has ended continue from their checkpoints.

    Args:
      directory: the directory of the sweep.
      trials: a new number of trials of the whole sweep; unchanged by default.
      jobs: see `run`.
      launch: see `run`.
      stream: see `run`.

    Raises:
      ValueError: there is no such sweep, or one of the reasons of `run`.
    """
    if jobs < 1:
        raise ValueError(f"Sweep: jobs must be at least 1; got {jobs}.")
    sweep, root = sweeps.read(directory), Path(directory).absolute()
    if trials is not None:
        sweep = dataclasses.replace(sweep, trials=trials)
        sweep.write(root)
    out = lasting(stream)
    (root / "logs").mkdir(exist_ok=True)
    worker = new_directory(root / "workers", socket.gethostname())
    with RunDir(worker).claimed():
        study = Study(sweep, root, worker.name)
        _Search(sweep, root, study, out).run(jobs, launch)
    rows = study.rows()
    print(f"\n{report.write(sweep, root, rows)}\n\n{root / report.FILE}", file=out, flush=True)
    if not any(row.state == "complete" for row in rows):
        failed = [f" Trial {row.number}: {row.error}" for row in rows if row.error][-1:]
        raise NoTrialError(f"None of {len(rows)} trials is complete.{''.join(failed)}")
    return rows


class _Search:
    """Trains trials until there are enough."""

    def __init__(self, sweep: Sweep, root: Path, study: Study, out: TextIO) -> None:
        self._sweep, self._root, self._study, self._out = sweep, root, study, out
        self._running: dict[str, _Running] = {}  # by the trial's number, as text

    def run(self, jobs: int, launch: Launch) -> None:
        """Trains trials in several processes at a time.

        Raises:
          Interrupted: SIGINT or SIGTERM was received, and all processes have ended.
        """
        with StopSignals() as stop:
            with contextlib.closing(Jobs(launch)) as processes:
                while stop.received is None:
                    while len(processes) < jobs and (trial := self._study.ask()) is not None:
                        self._start(trial, processes)
                    if not processes:
                        return
                    time.sleep(_PERIOD)
                    self._judge(processes)
                    for name, failure in processes.ended():
                        self._end(self._running.pop(name), failure)
                        report.write(self._sweep, self._root, self._study.rows())
            if stop.received is not None:
                raise Interrupted(stop.received)

    def _start(self, trial: Trial, processes: Jobs) -> None:
        directory, log = self._root / trial.directory, self._root / "logs" / str(trial.number)
        try:
            run_set = self._sweep.runs(trial.values)
        except ValueError as error:  # these values do not fit together
            self._fail(trial, str(error))
            return
        if not sets.is_set(directory):
            directory.mkdir(parents=True, exist_ok=True)
            run_set.write(directory)
        one = _Running(trial, run_set, directory)
        self._running[str(trial.number)] = one
        processes.start(str(trial.number), log, directory)
        values = report.text_of(trial.values)
        self._say(trial, f"{values}; its output is in {log}")

    def _judge(self, processes: Jobs) -> None:
        """Records new evaluations, and asks trials to end that are worse than most others."""
        for name, one in self._running.items():
            if self._record(one):
                processes.stop(name)

    def _record(self, one: _Running) -> bool:
        """Records the new evaluations of a trial; returns whether it should end."""
        for number, mean in one.evaluations():
            ends = self._study.report(one.trial.number, number, mean)
            if ends and self._sweep.prunes and not one.pruned:
                one.pruned = f"pruned after evaluation {number}, with return {mean:.1f}"
        return bool(one.pruned)

    def _end(self, one: _Running, failure: str) -> None:
        trial, pruned = one.trial, one.pruned
        self._record(one)
        if failure and pruned:
            self._study.prune(trial.number)
            self._say(trial, pruned)
        elif failure:
            self._fail(trial, failure)
        else:
            results = [read_result(RunDir(path)) for path in one.paths]
            returns = [result.eval_return_mean for result in results if result is not None]
            if len(returns) < len(results):
                self._fail(trial, "a run left no result")
                return
            value = float(np.mean(returns))
            if not math.isfinite(value):
                self._fail(trial, f"its return is {value}")
                return
            self._study.complete(trial.number, value)
            self._say(trial, f"return {value:.1f}")

    def _fail(self, trial: Trial, error: str) -> None:
        error = " ".join(error.split())
        self._study.fail(trial.number, error)
        self._say(trial, f"failed: {error}")

    def _say(self, trial: Trial, text: str) -> None:
        print(f"trial {trial.number}: {text}", file=self._out, flush=True)


class _Running:
    """A trial that trains.

    Attributes:
      trial: the trial.
      paths: the directories of its runs.
      pruned: why it was asked to end; "" if it was not.
    """

    def __init__(self, trial: Trial, run_set: RunSet, directory: Path) -> None:
        self.trial, self.pruned = trial, ""
        self.paths = [directory / member.name for member in run_set.members()]
        # Runs that train together are evaluated together. Otherwise the first seed decides, because
        # the others have not begun.
        base = run_set.base
        together = base.layout.is_compiled and not base.data and not base.policies
        self._metrics = [_Metrics(path) for path in (self.paths if together else self.paths[:1])]
        self._seen = 0

    def evaluations(self) -> Iterator[tuple[int, float]]:
        """Yields the number, from 1, and the mean return of each new evaluation of all runs."""
        returns = [metrics.returns() for metrics in self._metrics]
        while all(len(found) > self._seen for found in returns):
            mean = float(np.mean([found[self._seen] for found in returns]))
            self._seen += 1
            yield self._seen, mean


class _Metrics:
    """Reads the returns of a run's evaluations while they are written."""

    def __init__(self, directory: Path) -> None:
        self._path = RunDir(directory).metrics
        self._at = 0  # bytes that were read
        self._returns: list[float] = []

    def returns(self) -> list[float]:
        """Returns the mean returns of all evaluations so far."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(0, 2)
            if file.tell() < self._at:  # a resumed run moves lines to another file
                self._at, self._returns = 0, []
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
            self._at += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    value = jsonl.numbers(json.loads(line)).get(_RETURN)
                    if value is not None:
                        self._returns.append(value)
        return self._returns
