"""What the page of ``rlstack dashboard`` shows: plain data for JSON, and plots as HTML."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstack.math.intervals import Band
from rlstack.programs.session.metrics import processes
from rlstack.programs.session.metrics.processes import NodeProcess
from rlstack.programs.session.run_dir import RunDir, RunDirError, fetched, option_values
from rlstack.programs.tools.charts import Curve, Lines, curves_figure
from rlstack.programs.tools.status.curves import Curves
from rlstack.programs.tools.status.runs import NodeRow, NodeRows, RunReader, RunStatus, find_runs

Json = dict[str, Any]

_FRESH = 1.0  # seconds for which several pages get the same state
_DIGITS = 6  # significant digits of a number
_DATA = ("environment", "group", "run", "log", "frames", "hours", "value")
VIDEOS = {".mp4": "video/mp4", ".gif": "image/gif"}  # endings of videos, and their types
_NEWEST_VIDEOS = 5  # of a run that are shown
_JOINED = 200  # points of a curve that stands for several runs


class _Watched(NamedTuple):
    reader: RunReader
    curves: Curves


class Dashboard:
    """The runs of a directory, read again when a page asks; safe for several threads.

    A run that appears later is found, and one that is removed is left out.
    """

    def __init__(
        self, root: Path, limit: int = 30, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Creates the dashboard; `state` reads the runs.

        Args:
          root: the directory of a run or a study, or a folder that holds some or none yet.
          limit: most runs to show: those with the newest logs.
          clock: returns seconds.

        Raises:
          RunDirError: there is no such directory.
          ValueError: `limit` is below 1.
        """
        if limit < 1:
            raise ValueError(f"--limit must be at least 1; got {limit}")
        root = fetched(root)
        if not root.is_dir():
            raise RunDirError(
                f"{root} must be the directory of a run or a study, or a folder that holds "
                "some; there is no such directory"
            )
        self._root, self._limit, self._clock = root.absolute(), limit, clock
        self._watched: dict[Path, _Watched] = {}
        self._rows = NodeRows()
        self._lock = threading.Lock()
        self._state: Json = {}
        self._read_at = -math.inf

    def state(self) -> Json:
        """Returns the state of all shown runs; runs that a command is working on come first.

        `version` of a run changes when its curves do. `group` is equal for runs of one preset whose
        options differ in the seed only.
        """
        with self._lock:
            if self._clock() - self._read_at >= _FRESH:
                self._state, self._read_at = self._read(), self._clock()
            return self._state

    def plots(
        self,
        runs: Sequence[str],
        names: Iterable[str],
        *,
        hours: bool,
        seeds: bool,
        smooth: float = 0.0,
        log: bool = False,
        within: tuple[float, float] = (-math.inf, math.inf),
    ) -> dict[str, str] | None:
        """Returns plots of logs as of the last state, or None if it lacks one of the runs.

        Runs in different environments are never in one plot.

        Args:
          runs: the `id` of each run in the state.
          names: names of the logs.
          hours: whether the x axis is the time since a run's first line, instead of frames.
          seeds: whether runs of one `group` are one curve: their mean, and their range.
          smooth: the weight of earlier values in a moving average of each run, in [0, 1).
          log: whether the y axis is logarithmic; values that are not positive are left out.
          within: the first and the last place on the x axis to show.

        Returns:
          The figure of each log that a run has, as HTML; see `charts.curves_figure`. If the runs
          have several environments, the name of the log is followed by that of the environment.

        Raises:
          ValueError: `smooth` is not in [0, 1).
        """
        if not 0 <= smooth < 1:
            raise ValueError(f"smooth must be in [0, 1); got {smooth}")
        with self._lock:
            shown = {run["id"]: run for run in self._state.get("runs", ())}
            if not shown.keys() >= set(runs):
                return None
            label = "hours since the first line" if hours else "frames"
            figures = {}
            environments = sorted({shown[run]["environment"] for run in runs})
            for environment, name in itertools.product(environments, list(names)):
                groups: dict[str, list[Curve]] = {}
                for run in runs:
                    if shown[run]["environment"] != environment:
                        continue
                    key = shown[run]["group" if seeds else "name"]
                    curve = _curve(key, self._watched[self._root / run].curves, name, hours)
                    curve = _changed(curve, smooth, log)
                    if len(curve.x):
                        groups.setdefault(key, []).append(curve)
                parts = [_within(_joined(group), *within) for group in groups.values()]
                if curves := [curve for curve in parts if len(curve.x)]:
                    title = f"{name}, {environment}" if len(environments) > 1 else name
                    figures[title] = curves_figure(
                        Lines(title, label, "", curves, log=log),
                        legend=False,
                        from_zero=within[0] <= 0 <= within[1],
                        ends=True,
                    )
            return figures

    def data(self, runs: Sequence[str], names: Iterable[str]) -> str | None:
        """Returns the points of the curves as CSV, or None if the last state lacks one of the runs.

        They are neither smoothed nor joined; see `Curves` for how many there are.

        Args:
          runs: the `id` of each run in the state.
          names: names of the logs.
        """
        with self._lock:
            shown = {run["id"]: run for run in self._state.get("runs", ())}
            if not shown.keys() >= set(runs):
                return None
            out = io.StringIO()
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(_DATA)
            for run, name in itertools.product(runs, list(names)):
                about, curves = shown[run], self._watched[self._root / run].curves
                head = (about["environment"], about["group"], about["name"], name)
                writer.writerows(
                    (*head, frames, (time - curves.began) / 3600, value)
                    for frames, time, value in curves.points(name)
                )
            return out.getvalue()

    def video(self, run: str, name: str) -> Path | None:
        """Returns the file of a video as of the last state, or None if it has no such video."""
        with self._lock:
            for shown in self._state.get("runs", ()):
                if shown["id"] == run and name in shown["videos"]:
                    return RunDir(self._root / run).videos / name
            return None

    def _read(self) -> Json:
        paths = find_runs(self._root)
        shown = sorted(paths, key=_written, reverse=True)[: self._limit]
        watched, statuses = {}, []
        for path in shown:
            with contextlib.suppress(OSError, RunDirError):  # it is being removed
                watched[path] = self._watched.get(path) or _open(path)
                statuses.append(watched[path].reader.read())
        self._watched = {status.path: watched[status.path] for status in statuses}
        statuses.sort(key=lambda status: not status.active)
        found = processes.find()
        settings = _settings(statuses)
        return {
            "directory": RunDir(self._root).name,
            "hidden": len(paths) - len(shown),
            "runs": [
                self._run(status, options, found.get(str(status.path), {}))
                for status, options in zip(statuses, settings, strict=True)
            ],
        }

    def _run(self, status: RunStatus, options: Json, found: Mapping[str, NodeProcess]) -> Json:
        curves, result = self._watched[status.path].curves, status.result
        name = str(status.path.relative_to(self._root))
        rows = self._rows.of(status, found) if status.active else []
        group = [status.preset, *(f"{k}={v}" for k, v in options.items() if k != "seed")]
        return {
            "id": name,
            "name": status.path.name if name == "." else name,
            "preset": status.preset,
            "topology": status.topology,
            "environment": _environment(status.config),
            "state": status.state,
            "frames": status.frames,
            "budget": status.budget,
            "rate": _finite(status.rate),
            "left": _finite(status.seconds_left),
            "silence": _finite(status.silence),
            "logs": {name: _finite(value) for name, value in sorted(status.logs.items())},
            "actors_wait": status.actors_wait,
            "learner_waits": status.learner_waits,
            "bottleneck": status.bottleneck,
            "restarts": status.num_restarts,
            "result": None if result is None else _finite(result.eval_return_mean),
            "options": options,
            "group": " ".join(group),
            "nodes": [_node(row) for row in rows],
            "videos": _videos(status.path),
            "metrics": curves.names(),
            "version": curves.version,
        }


def _open(path: Path) -> _Watched:
    curves = Curves()
    return _Watched(RunReader(path, curves=curves), curves)


def _written(path: Path) -> float:
    """Returns when a run wrote last."""
    directory = RunDir(path)
    for file in (directory.metrics, directory.config):
        with contextlib.suppress(OSError):
            return file.stat().st_mtime
    return 0.0


def _videos(path: Path) -> list[str]:
    """Returns the names of a run's newest videos, which begin with the number of frames."""
    found = {}
    with contextlib.suppress(OSError):  # there are none
        for file in RunDir(path).videos.iterdir():
            if file.suffix in VIDEOS and file.stem.isdigit():
                found[int(file.stem)] = file.name
    return [found[frames] for frames in sorted(found)][-_NEWEST_VIDEOS:]


def _settings(statuses: Sequence[RunStatus]) -> list[Json]:
    """Returns for each run its options in which the runs of its preset differ."""
    presets: dict[str, list[Json]] = {}
    every = []
    for status in statuses:
        options = {name: _text(value) for name, value in option_values(status.config).items()}
        presets.setdefault(status.preset, []).append(options)
        every.append(options)
    found = []
    for status, options in zip(statuses, every, strict=True):
        others = presets[status.preset]
        names = dict.fromkeys(name for other in others for name in other)
        differ = [name for name in names if len({other.get(name) for other in others}) > 1]
        found.append({name: options[name] for name in differ if name in options})
    return found


def _text(value: object) -> str:
    return str(_finite(value)) if isinstance(value, float) else str(value)


def _node(row: NodeRow) -> Json:
    process = row.process
    return {
        "name": row.name,
        "state": row.state,
        "pid": None if process is None else process.pid,
        "cores": None if process is None else _finite(row.cores),
        "memory": None if process is None else process.memory,
        "restarts": row.restarts,
    }


def _curve(label: str, curves: Curves, name: str, hours: bool) -> Curve:
    """Returns the curve of a log of a run, without the points that are not finite."""
    found = [point for point in curves.points(name) if math.isfinite(point[2])]
    frames, times, values = np.array(found, np.float64).reshape(-1, 3).T
    return Curve(label, (times - curves.began) / 3600 if hours else frames, Band(*[values] * 3))


def _environment(config: Mapping[str, Any]) -> str:
    """Returns the name of the environment with its options; "" if a config has none."""
    env = config.get("env")
    if not isinstance(env, dict) or not isinstance(env.get("name"), str):
        return ""
    name, options = env["name"].rsplit(":")[-1], env.get("options")
    texts = [f"{k}={v}" for k, v in options.items()] if isinstance(options, dict) else []
    return f"{name} ({', '.join(sorted(texts))})" if texts else name


def _changed(curve: Curve, smooth: float, log: bool) -> Curve:
    """Returns a curve as a moving average, and without what a logarithmic axis does not have.

    The average is exponential, and divided by the weights so far, so that it does not begin near 0.
    """
    values, average, weight = [], 0.0, 0.0
    for value in curve.band.estimate.tolist() if smooth else ():
        average, weight = smooth * average + value, smooth * weight + 1
        values.append(average / weight)
    y = np.array(values) if smooth else curve.band.estimate
    kept = y > 0 if log else np.ones(len(y), bool)
    return Curve(curve.name, curve.x[kept], Band(*[y[kept]] * 3))


def _within(curve: Curve, low: float, high: float) -> Curve:
    kept = (curve.x >= low) & (curve.x <= high)
    return Curve(curve.name, curve.x[kept], Band(*(values[kept] for values in curve.band)))


def _joined(group: Sequence[Curve]) -> Curve:
    """Returns the mean and the range of curves, where all of them have values."""
    if len(group) == 1:
        return group[0]
    start, stop = max(curve.x[0] for curve in group), min(curve.x[-1] for curve in group)
    x = np.linspace(start, stop, _JOINED) if stop > start else np.array([start])
    values = np.stack([np.interp(x, curve.x, curve.band.estimate) for curve in group])
    return Curve(group[0].name, x, Band(values.mean(0), values.min(0), values.max(0)))


def _finite(value: float) -> float | None:
    """Returns a number that JSON can represent; None for NaN and infinities."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
