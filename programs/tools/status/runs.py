"""The state of one run, from the files of its directory, and its nodes, from their processes."""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.programs.program.failures import cause, read_failures
from rlstack.programs.session.metrics.processes import CpuMeter, NodeProcess
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir, fetched
from rlstack.programs.session.run_lock import Holder, holder_of
from rlstack.programs.tools.status.curves import Curves
from rlstack.storage import files, jsonl

# The state of a run, each with what it means.
STATES = {
    "starting": "a command has it, and there are no logs yet",
    "running": "a command has it",
    "elsewhere": "a command on another host has it, or had it when that host ended",
    "finished": "it has its result",
    "failed": "a node failed for good; its failures.jsonl says why",
    "killed": "its command ended without giving the directory free",
    "stopped": "it ended without a result; --resume continues it",
}

_TAIL = 1 << 17  # bytes of the metrics that are read at first: hundreds of lines
_WINDOW = 8  # lines over which waits are measured
_DEPTH = 4  # folder, sweep, trials, trial, run
_LONG_WAIT = 0.1  # share of the time from which a wait is worth a word
_AXES = ("env_frames", "wall_time")  # entries without which a metrics line is skipped
_NUMBERED = ("actor", "inferencer")  # groups of nodes whose names have a number


class RunStatus(NamedTuple):
    """The state of a run at one moment, as its files show it."""

    path: Path
    state: str  # one of STATES
    preset: str
    topology: str
    frames: int  # environment steps so far
    budget: int  # environment steps after which the run ends
    logs: Mapping[str, float]  # the newest value of each name
    silence: float  # seconds since the last line of logs; infinite without logs
    waits: Mapping[str, float]  # name of the log -> share of the time lately, 0 to 1
    restarts: Mapping[str, int]  # number of restarts of each node, by name
    nodes: tuple[str, ...]  # names of the nodes that have a log
    holder: Holder | None  # the command that has claimed the directory
    config: Mapping[str, Any]  # the run's config as JSON
    result: Result | None

    @property
    def active(self) -> bool:
        """Whether a command is working on the run, on this machine or elsewhere."""
        return self.state in ("running", "starting", "elsewhere")

    @property
    def rate(self) -> float:
        """Environment steps per second; 0 if unknown."""
        return self.logs.get("actor/frames_per_second", 0.0)

    @property
    def seconds_left(self) -> float:
        """Seconds until the budget is spent at the current rate; NaN if unknown."""
        if not (self.active and self.rate):
            return math.nan
        return max(0, self.budget - self.frames) / self.rate

    @property
    def num_restarts(self) -> int:
        """Restarts of all nodes."""
        return sum(self.restarts.values()) or _whole(self.logs.get("program/restarts"))

    @property
    def actors_wait(self) -> float | None:
        """The share of the time that actors wait for the learner; None if unknown."""
        return self._share("actor/")

    @property
    def learner_waits(self) -> float | None:
        """The share of the time that the learner waits for batches; None if unknown."""
        return self._share("replay/sample")

    def _share(self, prefix: str) -> float | None:
        found = [share for name, share in self.waits.items() if name.startswith(prefix)]
        return min(1.0, sum(found)) if found else None

    @property
    def bottleneck(self) -> str:
        """One sentence on what limits the speed; "" if the run does not measure waits."""
        actors, learner = self.actors_wait, self.learner_waits
        if actors is None and learner is None:
            return ""
        actors, learner = actors or 0.0, learner or 0.0
        if max(actors, learner) < _LONG_WAIT:
            return "Actors and learner wait little."
        if actors > learner:
            return (
                f"The learner is the bottleneck: actors wait {actors:.0%} of the time for space in "
                "the replay."
            )
        return f"Acting is the bottleneck: the learner waits {learner:.0%} of the time for batches."


class RunReader:
    """Reads the state of a run repeatedly; each call reads only the new lines of the metrics."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, curves: Curves | None = None
    ) -> None:
        """Opens the directory of a run.

        Args:
          path: the directory.
          clock: returns Unix seconds.
          curves: receives every line of the metrics. Without it, only the end of a long file is
            read.

        Raises:
          RunDirError: the directory holds no run.
        """
        self._directory = RunDir.open(path)
        self._clock = clock
        self._curves = curves
        self._config: Mapping[str, Any] = {}
        self._offset = 0
        self._inode = -1
        self._logs: dict[str, float] = {}
        self._lines: deque[dict[str, float]] = deque(maxlen=_WINDOW)

    def read(self) -> RunStatus:
        """Returns the current state."""
        self._read_metrics()
        directory, config = self._directory, self._read_config()
        holder = _holder(directory.path)
        last = self._lines[-1] if self._lines else {}
        failures = read_failures(directory.failures)
        restarts = Counter(str(failure["node"]) for failure in failures if failure["restarts"])
        frames, result = int(last.get("env_frames", 0)), read_result(directory)
        return RunStatus(
            path=directory.path,
            state=self._state(holder, result, frames),
            preset=str(config.get("preset", "")),
            topology=str(config.get("topology", "")),
            frames=frames,
            budget=_budget(config),
            logs=dict(self._logs),
            silence=self._clock() - last["wall_time"] if last else math.inf,
            waits=self._waits(),
            restarts=dict(restarts),
            nodes=_logged_nodes(directory.node_logs),
            holder=holder,
            config=config,
            result=result,
        )

    def _read_config(self) -> Mapping[str, Any]:
        """Returns the config, or the last one that could be read: the file may be another's."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = files.read_json(self._directory.config)
            if isinstance(found, dict):
                self._config = found  # a resumed run may have a new budget
        return self._config

    def _state(self, holder: Holder | None, result: Result | None, frames: int) -> str:
        if holder is not None and holder.alive:
            return "running" if self._lines else "starting"
        if holder is not None and holder.alive is None:
            return "elsewhere"
        if result is not None and result.env_frames >= frames:
            return "finished"
        if cause(read_failures(self._directory.failures)) is not None:
            return "failed"
        return "stopped" if holder is None else "killed"

    def _read_metrics(self) -> None:
        try:
            with open(self._directory.metrics, "rb") as file:
                found = file.seek(0, 2)
                inode = self._directory.metrics.stat().st_ino
                if inode != self._inode or found < self._offset:  # a resumed run has rewritten it
                    self._inode, self._offset = inode, 0
                    self._lines.clear()
                    if self._curves is not None:
                        self._curves.clear()
                if self._curves is None:
                    self._offset = max(self._offset, found - _TAIL)
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    self._offset += len(line)
                    with contextlib.suppress(ValueError, RecursionError):
                        self._take(json.loads(line))
        except OSError:
            return

    def _take(self, line: Any) -> None:
        numbers = jsonl.numbers(line)
        if not all(math.isfinite(numbers.get(name, math.nan)) for name in _AXES):
            return
        self._lines.append(numbers)
        self._logs.update(numbers)
        if self._curves is not None:
            self._curves.take(numbers)

    def _waits(self) -> dict[str, float]:
        """Returns the share of the time that nodes have waited, by the name of the log."""
        found = {}
        names = {name for name in self._logs if name.endswith("wait_seconds")}
        for name in names:
            points = [(line["wall_time"], line[name]) for line in self._lines if name in line]
            if len(points) > 1 and points[-1][0] > points[0][0]:
                share = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
                found[name] = min(1.0, max(0.0, share))
        return found


class NodeRow(NamedTuple):
    """A node at one moment."""

    name: str
    state: str  # up, down, or ? if it may be on another host
    process: NodeProcess | None
    cores: float  # number of cores that the node keeps busy
    restarts: int


class NodeRows:
    """Finds the nodes of runs repeatedly, and measures their processor time between two calls."""

    def __init__(self) -> None:
        """Starts without measurements of processor time."""
        self._cpu = CpuMeter()

    def of(self, status: RunStatus, found: Mapping[str, NodeProcess]) -> list[NodeRow]:
        """Returns the nodes of a run.

        Args:
          status: the status of the run.
          found: the processes of the run, by node.
        """
        program = {name for name in found if name != "train"}
        # With several policies, a log may name a node without its policy: learner is then the
        # process learner/retailer.
        named = {name.split("/")[0] for name in program - set(status.nodes)}
        logged = {n for n in status.nodes if n in program or n.split("/")[0] not in named}
        names = sorted(logged | program) if program or status.nodes else ["train"]
        rows = []
        for name in names:
            process, restarts = found.get(name), status.restarts.get(name, 0)
            if process is None:
                elsewhere = status.state == "elsewhere" or not found
                rows.append(NodeRow(name, "?" if elsewhere else "down", None, 0.0, restarts))
                continue
            cores = self._cpu.share(f"{status.path}:{name}", process)
            rows.append(NodeRow(name, "up", process, cores, restarts))
        return rows


def find_runs(path: Path, depth: int = _DEPTH) -> list[Path]:
    """Returns the runs of a directory: itself, or those at most `depth` levels below it, sorted.

    Links are followed, and each directory is looked at once: a link may lead to a folder above it.
    """
    path = fetched(path)
    found, seen = [], set[tuple[int, int]]()
    waiting = [(False, 0, path)]  # the least is next: links last, since processes name real paths
    while waiting:
        linked, level, folder = heapq.heappop(waiting)
        with contextlib.suppress(OSError):
            about = folder.stat()
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            if (folder / "config.json").is_file():
                found.append(folder)
            elif level < depth:
                with os.scandir(folder) as entries:
                    for x in entries:
                        if x.is_dir():
                            inner = (linked or x.is_symlink(), level + 1, Path(x.path))
                            heapq.heappush(waiting, inner)
    return sorted(found)


def _budget(config: Mapping[str, Any]) -> int:
    """Returns the budget of frames, with the steps learned from before the run acts."""
    replay = config.get("replay")
    sizes = replay if isinstance(replay, Mapping) else {}
    learned = _whole(config.get("offline_updates"))
    for name in ("batch_size", "unroll_length"):
        learned *= _whole(sizes.get(name))
    return _whole(config.get("frames")) + learned


def _whole(value: Any) -> int:
    """Returns a number of JSON as a whole one; 0 for anything else."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 63 else 0


def _holder(path: Path) -> Holder | None:
    """Returns the command that has a run; None if the lock's file is not one of rlstack."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return holder_of(path)
    return None


def _logged_nodes(logs: Path) -> tuple[str, ...]:
    """Returns the nodes whose output is in ``logs/GROUP/NUMBER``, such as actor/0 and learner."""
    names = []
    for path in sorted(logs.glob("*/*")):
        group, number = path.parent.name, path.name
        if number.isdecimal():
            names.append(f"{group}/{number}" if group in _NUMBERED else group)
    return tuple(dict.fromkeys(names))  # with several policies there are several learners
