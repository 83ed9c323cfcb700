"""The scores of a suite in small files, from which pages are made again.

``data/SUITE/AGENT.json`` has, for each task, the experiment, and for each run its result, the mean
return of the last episodes of training, and a curve of few points.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from rlstack.programs.config.encoding import from_json, plain, to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.stopping import EPISODES
from rlstack.programs.study.benchmark import recordings
from rlstack.programs.study.benchmark.runs import Job
from rlstack.programs.study.benchmark.suites import Suite
from rlstack.programs.tools.report import runs as reports
from rlstack.programs.tools.report.normalisation import Range
from rlstack.storage import files, jsonl

_POINTS = 50  # of a curve
_EPISODES = 100  # at the end of training
_RETURN, _LENGTH, _OWN = "actor/episode_return", "actor/episode_length", "episode/"
_RATIOS = 1, 1.2, 1.4, 1.7, 2, 2.5, 3, 4, 5, 6, 7, 8, 9


class Scored(NamedTuple):
    """A finished run of a task."""

    result: Result
    last_100: float | None  # mean return of about the last 100 episodes of training
    frames: tuple[float, ...]
    returns: tuple[float, ...]  # at these frames
    values: Mapping[str, Option] = MappingProxyType({})  # of the options of its setting
    # "episodes": numbers of episodes since the start, and by name the sums of the environment's
    # own numbers over these episodes.
    totals: Mapping[str, tuple[float, ...]] = MappingProxyType({})


class TaskRecord(NamedTuple):
    """The finished runs of a task."""

    experiment: Experiment
    runs: Sequence[Scored]
    unfinished: int = 0
    range: Range | None = None  # of recorded data of the suite's own


class Record(NamedTuple):
    """What an agent reached on a suite."""

    suite: str
    agent: str
    tasks: dict[str, TaskRecord]

    def runs(self, suite: Suite) -> dict[str, list[reports.Run]]:
        """Returns the runs of each task as a report has them, with the protocol's scores.

        Raises:
          ValueError: the protocol scores training, and a run has no such score.
        """
        return {
            task.name: [self._run(suite, task.name, scored) for scored in record.runs]
            for task in suite.tasks
            if (record := self.tasks.get(task.name)) is not None and record.runs
        }

    def _run(self, suite: Suite, task: str, scored: Scored) -> reports.Run:
        result = scored.result
        if suite.protocol.score == "last_100":
            if scored.last_100 is None:
                raise ValueError(
                    f"benchmark {self.suite}: the run of {task} with seed {result.seed} has no "
                    "returns of training in its logs. Train it with --loggers jsonl."
                )
            result = result._replace(eval_return_mean=scored.last_100)
        curve = np.array(scored.frames), np.array(scored.returns)
        return reports.Run(self.tasks[task].experiment, result, *curve, 0, 0)


def collect(suite: Suite, agent: str, jobs: Sequence[Job]) -> Record:
    """Returns the record of the finished runs of some tasks."""
    tasks = {}
    for job in jobs:
        runs = []
        seeds = len(job.study.seeds)
        for trial in sorted(job.study.trials(), key=lambda t: (t.number // seeds, t.seed or 0)):
            path = job.path / trial.name
            if read_result(RunDir(path)) is not None:
                runs.append(_scored(path)._replace(values=dict(trial.values)))
        ends = recordings.range_of(job.task, recordings.folder_of(job.path.parent))
        tasks[job.task.name] = TaskRecord(job.study.base, runs, job.number - len(runs), ends)
    return Record(suite.name, agent, tasks)


def with_ranges(suite: Suite, records: Sequence[Record]) -> Suite:
    """Returns a suite with the ranges of its own recorded data, as records have them.

    Raises:
      ValueError: two records are of different data.
    """
    found: dict[str, Range] = {}
    for record in records:
        for name, task in record.tasks.items():
            if task.range and found.setdefault(name, task.range) != task.range:
                raise ValueError(
                    f"benchmark {suite.name}: all agents must have learned {name} from the same "
                    f"recorded data; {record.agent} has other data. Train it again, or remove its "
                    "scores."
                )
    return suite.with_ranges(found)


def write(suite: Suite, record: Record, folder: Path, budget: int = 0) -> Path:
    """Writes a record below a folder of pages; returns the path of the file.

    Tasks of an earlier file that the record lacks stay in it, if they had the same budget.

    Args:
      suite: the suite.
      record: the record.
      folder: the folder of pages.
      budget: the frames of each run, as for `Suite.experiment`.
    """
    path = folder / "data" / record.suite / f"{record.agent}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = _read(path).tasks if path.exists() else {}
    tasks = {}
    for task in suite.tasks:
        old = earlier.get(task.name)
        if task.name in record.tasks:
            tasks[task.name] = record.tasks[task.name]
        elif old and old.experiment.frames == suite.experiment(task, record.agent, budget).frames:
            tasks[task.name] = old
    files.write(path, "".join(_lines(record._replace(tasks=tasks))))
    return path


def read_all(suite: Suite, folder: Path) -> list[Record]:
    """Returns the records of a suite below a folder of pages.

    Raises:
      ValueError: there is none, or a file is damaged.
    """
    paths = sorted((folder / "data" / suite.name).glob("*.json"))
    if not paths:
        raise ValueError(
            f"benchmark {suite.name}: {folder} must have scores in data/{suite.name}; there are "
            f"none. rlstack benchmark {suite.name} --out {folder} trains, and writes them."
        )
    return [_read(path) for path in paths]


def _scored(path: Path) -> Scored:
    run = reports.read(path)
    metrics = RunDir(path).metrics
    lines = jsonl.read_logs(metrics) if metrics.exists() else []
    frames, returns = _thinned(run.frames, run.returns)
    return Scored(run.result, _last(lines), frames, returns, totals=_totals(lines))


def _totals(lines: Sequence[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Returns the sums of environments' numbers over all episodes, at some numbers of episodes.

    These are those at which bsuite writes logs, and the last one. A line of logs has the means of
    the episodes that ended since the line before; sums within it are interpolated.
    """
    lines = [line for line in lines if EPISODES in line and _RETURN in line]
    names = [name for name in (lines[-1] if lines else {}) if name.startswith(_OWN)]
    if not names:
        return {}
    ended = np.array([0, *(line[EPISODES] for line in lines)], float)
    points = [10**power * ratio for power in range(9) for ratio in _RATIOS]
    first, last = ended[1], ended[-1]
    at = np.array([*(point for point in points if first <= point < last), last])
    found = {"episodes": tuple(float(f"{x:.6g}") for x in at)}
    for name in names:
        means = np.array([line[name] for line in lines], float)
        sums = np.concatenate([[0.0], np.cumsum(means * np.diff(ended))])
        found[name.removeprefix(_OWN)] = tuple(
            float(f"{x:.6g}") for x in np.interp(at, ended, sums)
        )
    return found


def _last(lines: Sequence[dict[str, Any]]) -> float | None:
    """Returns the mean return of about the last 100 episodes of training; None without logs.

    A line of logs has the mean of the episodes that ended since the line before. It counts as many
    episodes as its frames are long.
    """
    weights, values, before = [], [], 0
    for line in lines:
        if _RETURN in line and _LENGTH in line:
            weights.append(max(1.0, (line["env_frames"] - before) / line[_LENGTH]))
            values.append(line[_RETURN])
        if _LENGTH in line or _RETURN in line:
            before = line["env_frames"]
    if not values:
        return None
    needed, total, mass = float(_EPISODES), 0.0, 0.0
    for weight, value in zip(reversed(weights), reversed(values), strict=True):
        part = min(weight, needed)
        total, mass, needed = total + part * value, mass + part, needed - part
        if needed <= 0:
            break
    return total / mass


def _thinned(
    frames: np.ndarray, returns: np.ndarray
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns a curve of few points; each is the mean over the frames since the one before."""
    ok = np.isfinite(returns)
    frames, returns = frames[ok], returns[ok]
    widths = np.maximum(np.diff(frames, prepend=0.0), 1e-9)
    parts = np.array_split(np.arange(len(frames)), max(1, min(_POINTS, len(frames))))
    means = [
        (frames[part[-1]], np.average(returns[part], weights=widths[part]))
        for part in parts
        if len(part)
    ]
    return tuple(float(x) for x, _ in means), tuple(float(f"{y:.6g}") for _, y in means)


def _lines(record: Record) -> Iterator[str]:
    """Yields JSON with a line for each run, so that a change of a run changes one line."""
    yield f'{{"suite": {json.dumps(record.suite)}, "agent": {json.dumps(record.agent)}, "tasks": {{'
    for i, (name, task) in enumerate(record.tasks.items()):
        config = json.dumps(json.loads(to_json(task.experiment)))
        yield f'{"," if i else ""}\n{json.dumps(name)}: {{"unfinished": {task.unfinished},\n'
        ends = f' "range": {json.dumps(task.range)},\n' if task.range else ""
        yield f'{ends} "experiment": {config},\n "runs": ['
        rows = (
            json.dumps(_filled({**run._asdict(), "result": _plain(run.result)}), default=plain)
            for run in task.runs
        )
        yield ",".join(f"\n  {row}" for row in rows)
        yield "\n ]}"
    yield "\n}}\n"


def _filled(run: dict[str, Any]) -> dict[str, Any]:
    """Returns a run without the mappings that are empty."""
    return {name: dict(x) if isinstance(x, Mapping) else x for name, x in run.items() if x != {}}


def _plain(result: Result) -> dict[str, Any]:
    found = result._asdict().items()
    return {name: dict(x) if isinstance(x, Mapping) else x for name, x in found}


def _read(path: Path) -> Record:
    try:
        tree = files.read_json(path)
        tasks = {
            name: TaskRecord(
                from_json(json.dumps(row["experiment"]), path),
                [_of_tree(run) for run in row["runs"]],
                row["unfinished"],
                tuple(row["range"]) if "range" in row else None,
            )
            for name, row in tree["tasks"].items()
        }
        return Record(tree["suite"], tree["agent"], tasks)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} must have the scores of a suite, as rlstack benchmark writes them: {error!r}."
        ) from error


def _of_tree(run: dict[str, Any]) -> Scored:
    return Scored(
        Result(**run["result"]),
        run["last_100"],
        tuple(run["frames"]),
        tuple(run["returns"]),
        run.get("values", {}),
        {name: tuple(sums) for name, sums in run.get("totals", {}).items()},
    )
