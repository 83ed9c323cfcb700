"""Trains each task of a suite as a study of several seeds, and estimates the cost beforehand."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config import options
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run import plan
from rlstack.programs.session.display import lasting
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study import study as studies
from rlstack.programs.study import train as training
from rlstack.programs.study.benchmark import recordings
from rlstack.programs.study.benchmark.suites import Suite, Task
from rlstack.programs.study.executors import may_share_a_program
from rlstack.programs.study.processes import Launch
from rlstack.programs.study.study import FailedTrialsError, Study, is_study
from rlstack.storage import jsonl

_LEAST_LINES = 2  # lines of logs that a measurement has: the first one compiled


class Job(NamedTuple):
    """A task with the study that trains it and the directory of that study."""

    task: Task
    study: Study
    path: Path

    def results(self) -> list[Result]:
        """Returns the results of the runs that have finished."""
        runs = (RunDir(self.path / trial.name) for trial in self.study.trials())
        return [result for run in runs if (result := read_result(run)) is not None]

    @property
    def number(self) -> int:
        """The number of runs."""
        return len(self.study.trials())

    @property
    def left(self) -> int:
        """The number of runs that have not finished."""
        return self.number - len(self.results())


def jobs_of(
    suite: Suite,
    agent: str,
    root: Path,
    *,
    seeds: Sequence[int] = (),
    frames: int = 0,
    tasks: Sequence[str] = (),
    few: bool = False,
    modules: tuple[str, ...] = (),
) -> list[Job]:
    """Returns the tasks of a suite with their studies.

    A study that exists keeps its seeds and values and gets those that are new.

    Args:
      suite: the suite.
      agent: the name of an agent of the suite, or of a preset.
      root: the directory of the studies.
      seeds: the seeds; by default as many as the suite says.
      frames: another budget of each run.
      tasks: the names of the tasks; by default all whose files are there.
      few: whether tasks with many settings have few of them.
      modules: the user's modules that the agent needs.

    Raises:
      ValueError: there is no such task, or a directory has a study of another experiment.
    """
    known = {task.name: task for task in suite.tasks}
    if unknown := [name for name in tasks if name not in known]:
        raise ValueError(
            f"benchmark {suite.name}: --tasks must be among {', '.join(known)}; got "
            f"{', '.join(unknown)}."
        )
    found = []
    for name in tasks or [task.name for task in suite.tasks if not task.missing]:
        task = known[name]
        chosen = tuple(seeds) or tuple(range(1, suite.seeds_of(task, few) + 1))
        experiment, path = suite.experiment(task, agent, frames), root / name
        values = task.settings(few)
        experiment = dataclasses.replace(experiment, modules=modules)
        if task.recorded:
            data = str(recordings.path_of(task, recordings.folder_of(root)))
            experiment = dataclasses.replace(experiment, data=data)
        if is_study(path):
            earlier = studies.read(path)
            if earlier.base != experiment:
                raise ValueError(
                    f"{path} has runs of other options than {suite.name} has today. Name another "
                    "--run-dir, or finish that study: rlstack train --resume "
                    f"{path}. rlstack diff shows what differs between two runs."
                )
            chosen = tuple(dict.fromkeys((*earlier.seeds, *chosen)))
            made: Mapping[str, Any] = earlier.values
            values = {
                option: tuple(dict.fromkeys((*made[option], *of_task)))
                for option, of_task in values.items()
            }
        found.append(Job(task, Study(experiment, chosen, values), path))
    return found


def train(
    jobs: Sequence[Job],
    *,
    at_once: int = 1,
    launch: Launch | None = None,
    stream: TextIO | None = None,
) -> None:
    """Trains what has not finished, task after task.

    Args:
      jobs: the tasks.
      at_once: the number of processes that train runs of a task at the same time; with 1 this
        process trains them, in one compiled program where that is possible.
      launch: starts processes; see `rlstack.programs.study.train.run`.
      stream: receives the progress; standard error by default.

    Raises:
      FailedTrialsError: runs failed. All other runs have ended.
      Interrupted: SIGINT or SIGTERM was received; the same call continues.
    """
    errors = []
    how: dict[str, Any] = {"jobs": at_once, "launch": launch, "stream": stream}
    for job in jobs:
        reports = job.task.score is None  # others have a page of the suite only
        if not job.left:
            print(f"{job.task.name}: all runs have finished", file=lasting(stream), flush=True)
            continue
        try:
            if is_study(job.path):
                with RunDir(job.path).claimed():
                    job.study.write(job.path)
                training.resume(job.path, reports=reports, **how)
            else:
                training.run(job.study, job.path, reports=reports, **how)
        except FailedTrialsError as error:
            errors.append(f"{job.task.name}: {error}")
    if errors:
        raise FailedTrialsError("\n".join(errors))


class Cost(NamedTuple):
    """What it takes to finish some tasks."""

    frames: int  # of all runs that have not finished
    seconds: float  # 0 if no rate is known
    source: str  # where the rates are from
    replay: int  # bytes of the replays that are in memory at once

    def __str__(self) -> str:
        """Returns the cost in one line."""
        if not self.frames:
            return "nothing is left to train"
        time = "an unknown time"
        if self.seconds:
            hours = self.seconds / 3600
            time = f"about {hours:,.1f} hours" if hours >= 1 else f"about {60 * hours:,.1f} minutes"
        return (
            f"{self.frames:,} frames, {time} ({self.source}), replay {self.replay / 2**20:,.1f} "
            "MiB at most"
        )


def check(jobs: Sequence[Job]) -> None:
    """Makes one environment of each task.

    Raises:
      ValueError: an environment cannot be made; the message says what is missing.
    """
    for env in {repr(job.study.base.env): job.study.base for job in jobs}.values():
        environment_spec(env)


def cost(
    jobs: Sequence[Job], *, at_once: int = 1, stored: float = 0.0, machine_of: str = ""
) -> Cost:
    """Returns what it takes to finish tasks.

    A task with finished runs goes on as fast as these. Others are as fast as the finished runs of
    other tasks, or else as a stored rate says.

    Args:
      jobs: the tasks.
      at_once: the number of processes.
      stored: frames of all seeds in a second, as somebody measured it; 0 for none.
      machine_of: where that was.
    """
    left = [job for job in jobs if job.left]
    if not left:
        return Cost(0, 0.0, "", 0)
    measured = {job.task.name: _rate(job, at_once) for job in jobs}
    known = [rate for rate in measured.values() if rate]
    usual = float(np.mean(known)) if known else stored
    frames = {job.task.name: job.left * job.study.base.frames for job in left}
    rates = {name: measured[name] or usual for name in frames}
    seconds = sum(frames[n] / rates[n] for n in frames) if all(rates.values()) else 0.0
    source = "no rate is stored; --measure SECONDS finds one"
    if known:
        source = "as fast as the finished runs here"
    elif stored:
        source = f"at a stored rate of {stored:,.0f} frames/s, measured on {machine_of}"
    together = 1 if at_once > 1 else max(job.number for job in left)
    if not may_share_a_program(left[0].study):
        together = 1
    with tempfile.TemporaryDirectory() as folder:  # in which the plan writes nothing
        replay = plan.plan(left[0].study.base, folder).replay_bytes
    return Cost(sum(frames.values()), seconds, source, replay * together * at_once)


def measure(job: Job, seconds: float, stream: TextIO | None = None) -> float:
    """Returns the frames of all seeds in a second, in a short training of a task.

    Compiling does not count. What the training leaves is deleted.

    Args:
      job: the task.
      seconds: how long to train, with compiling.
      stream: receives the progress.

    Raises:
      ValueError: the time was too short to measure.
    """
    base = job.study.base
    period = max(base.env.num_envs, base.frames // 1_000)
    short: Experiment = _replaced(
        base,
        {
            "hours": seconds / 3600,
            "log_period": period,
            "checkpoint_period": base.frames,
            "evaluator.period": "off",
            "evaluator.episodes": base.evaluator.num_envs,
        },
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured"
        study = Study(short, job.study.seeds)  # with one setting of a task that has several
        training.run(study, path, stream=stream)
        rates = [_logged_rate(path / trial.name) for trial in study.trials()]
    if not all(rates):
        raise ValueError(
            f"benchmark: --measure {seconds:g} is too short for {job.task.name}: the program was "
            "still compiling. Give it more seconds."
        )
    return float(sum(rates)) if may_share_a_program(job.study) else float(np.mean(rates))


def _replaced(experiment: Experiment, values: Mapping[str, object]) -> Experiment:
    for name, value in values.items():
        experiment = options.replaced(experiment, name, value, "benchmark:")
    return experiment


def _logged_rate(path: Path) -> float:
    """Returns the median speed of a run between lines of logs; 0 if there are too few."""
    name = "actor/frames_per_second"
    lines = jsonl.read_logs(RunDir(path).metrics)
    found = [line[name] for line in lines if name in line]
    return float(np.median(found[1:])) if len(found) >= _LEAST_LINES else 0.0


def _rate(job: Job, at_once: int) -> float:
    """Returns the frames of all seeds in a second in the finished runs of a task; 0 for none."""
    results = job.results()
    if not results:
        return 0.0
    each = [result.wall_seconds for result in results]
    together = at_once == 1 and may_share_a_program(job.study)
    seconds = max(each) if together else sum(each) / at_once
    return sum(result.env_frames for result in results) / max(seconds, 1e-9)
