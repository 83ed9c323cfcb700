"""The state of one run, from the files of its directory."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from programs.nodes.failures import cause, read_failures
from programs.tracking.result import read_result
from programs.tracking.run_dir import RunDir
from programs.tracking.run_lock import Holder, holder_of

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
_NUMBERED = ("actor", "inferencer")  # groups of nodes whose names have a number


class RunStatus(NamedTuple):
    """What is known of a run at one moment."""

    path: Path
    state: str  # one of STATES
    preset: str
    topology: str
    frames: int  # environment steps so far
    budget: int  # of them
    logs: Mapping[str, float]  # the newest value of each name
    silence: float  # seconds since the last line of logs; infinite without logs
    waits: Mapping[str, float]  # name of the log -> share of the time lately, 0 to 1
    restarts: Mapping[str, int]  # of nodes, by name
    nodes: tuple[str, ...]  # those with a log
    holder: Holder | None  # the command that has the directory


class RunReader:
    """Reads the state of a run again and again; each time only the new lines of its metrics."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Opens the directory of a run.

        Args:
          path: the directory.
          clock: returns Unix seconds.

        Raises:
          RunDirError: it holds no run.
        """
        self._directory = RunDir.open(path)
        self._clock = clock
        self._config: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self._config = json.loads(self._directory.config.read_text())
        self._offset = 0
        self._inode = -1
        self._logs: dict[str, float] = {}
        self._lines: deque[dict[str, float]] = deque(maxlen=_WINDOW)

    def read(self) -> RunStatus:
        """Returns the state of now."""
        self._read_metrics()
        directory, config = self._directory, self._config
        holder = holder_of(directory.path)
        with contextlib.suppress(OSError, ValueError):  # a resumed run may have a new budget
            config = json.loads(directory.config.read_text())
        last = self._lines[-1] if self._lines else {}
        failures = read_failures(directory.failures)
        restarts = Counter(str(failure["node"]) for failure in failures if failure["restarts"])
        return RunStatus(
            path=directory.path,
            state=self._state(holder, int(last.get("env_frames", 0))),
            preset=str(config.get("preset", "")),
            topology=str(config.get("topology", "")),
            frames=int(last.get("env_frames", 0)),
            budget=int(config.get("frames", 0)),
            logs=dict(self._logs),
            silence=self._clock() - last["wall_time"] if last else math.inf,
            waits=self._waits(),
            restarts=dict(restarts),
            nodes=_logged_nodes(directory.node_logs),
            holder=holder,
        )

    def _state(self, holder: Holder | None, frames: int) -> str:
        if holder is not None and holder.alive:
            return "running" if self._lines else "starting"
        if holder is not None and holder.alive is None:
            return "elsewhere"
        result = read_result(self._directory)
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
                start = max(self._offset, found - _TAIL)
                file.seek(start)
                text = file.read(found - start)
        except OSError:
            return
        whole = text.rfind(b"\n") + 1
        self._offset = start + whole
        for line in text[:whole].splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                self._take(json.loads(line))

    def _take(self, line: Any) -> None:
        if not isinstance(line, dict) or not {"env_frames", "wall_time"} <= line.keys():
            return
        numbers = {}
        for name, value in line.items():
            with contextlib.suppress(TypeError, ValueError):
                numbers[name] = float(value)
        self._lines.append(numbers)
        self._logs.update(numbers)

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


def find_runs(path: Path) -> list[Path]:
    """Returns the runs of a directory: itself, or those directly below it and below its folders."""
    if (path / "config.json").is_file():
        return [path]
    found = [
        file.parent for pattern in ("*", "*/*") for file in path.glob(f"{pattern}/config.json")
    ]
    return sorted(found)


def _logged_nodes(logs: Path) -> tuple[str, ...]:
    """Returns the nodes whose output is in ``logs/GROUP/NUMBER``, such as actor/0 and learner."""
    names = []
    for path in sorted(logs.glob("*/*")):
        group, number = path.parent.name, path.name
        if number.isdecimal():
            names.append(f"{group}/{number}" if group in _NUMBERED else group)
    return tuple(names)
