"""The coordinator: counts frames, keeps the logs, and tells every node of a program what is due.

Nodes report a few times a second; the answer says in which phase the program is and how many
checkpoints and evaluations have become due since its start. Nothing is pushed: a node that is slow
or restarting hears of everything at its next report.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from programs.experiment import Experiment
from programs.tracking.periodic import PeriodicActions
from programs.tracking.run_dir import RunDir
from rlstack.acting.evaluator import Evaluation, as_logs
from rlstack.rpc import remote
from rlstack.storage.loggers import Fanout, Logger

# The phases of a program, in their order.
RUNNING = "running"  # acting and learning
SAVING = "saving"  # actors end; the learner saves and goes on handing out params
JUDGING = "judging"  # the last evaluation
OVER = "over"  # every node ends


REPORT_SECONDS = 0.2  # between two reports of a node
_SILENT = 3.0  # seconds after which a node that does not report is shown as silent


@dataclasses.dataclass
class _Node:
    """What is known of one node."""

    incarnation: int = 0
    pid: int = 0
    seen: float = 0.0
    left: bool = False  # it has said so, or was told that all is over
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gauges: Mapping[str, float] = dataclasses.field(default_factory=dict)
    history: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=25)  # (time, frames) of the last seconds
    )

    def frames_per_second(self) -> float:
        """Frames of this incarnation over the last seconds."""
        (then, before), (now, frames) = self.history[0], self.history[-1]
        return max(0.0, frames - before) / (now - then) if now > then else 0.0


class _Newest:
    """A logger that remembers the newest value of everything."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Takes one line of logs."""
        del step
        self.logs.update({name: float(value) for name, value in logs.items()})

    def close(self) -> None:
        """Does nothing."""


class Coordinator:
    """The clerk of one program; its public methods may be called from any thread."""

    def __init__(
        self, experiment: Experiment, directory: RunDir, logger: Logger, start_frames: int = 0
    ) -> None:
        """Starts the clock.

        Args:
          experiment: whose budget and periods hold.
          directory: where the result is filed.
          logger: where logs go, by frames.
          start_frames: frames of the runs that this one resumes.
        """
        self._experiment, self._directory = experiment, directory
        self._newest = _Newest()
        self._logger = Fanout([logger, self._newest])
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._periodic = PeriodicActions(
            experiment,
            self._logger,
            start_frames=start_frames,
            evaluate=lambda _: self._due("evaluations"),
            checkpoint=lambda _: self._due("checkpoints"),
        )
        self._frames = start_frames
        self._learner_steps = 0
        self._lost_frames = 0.0
        self._orders: dict[str, Any] = {"phase": RUNNING, "checkpoints": 0, "evaluations": 0}
        self._nodes: dict[str, _Node] = {}
        self._addresses: dict[str, str] = {}
        self._interrupted = 0

    @remote()
    def report(
        self,
        node: str,
        incarnation: int,
        pid: int,
        counts: Mapping[str, float],
        gauges: Mapping[str, float],
        logs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Takes a node's news and returns what is due.

        Args:
          node: its name, such as "actor/0".
          incarnation: how often it has been restarted.
          pid: its process.
          counts: totals since the incarnation began; ``env_frames`` and ``learner_steps`` count,
            ``ended`` says that this is the last report.
          gauges: numbers as they are now, logged as means over the nodes that have them.
          logs: values to average, each a list of numbers.

        Returns:
          ``phase``, ``env_frames``, and the ``checkpoints`` and ``evaluations`` due so far.
        """
        with self._lock:
            known = self._nodes.setdefault(node, _Node(incarnation))
            if incarnation < known.incarnation:  # one that was given up: it may well live still
                return {**self._answer(), "phase": OVER}
            if incarnation > known.incarnation:
                self._lost_frames += self._lost_with(known)
            before = known.counts if incarnation == known.incarnation else {}
            self._frames += int(counts.get("env_frames", 0) - before.get("env_frames", 0))
            self._learner_steps = int(counts.get("learner_steps", self._learner_steps))
            known.incarnation, known.pid, known.seen = incarnation, pid, time.monotonic()
            known.counts, known.gauges = counts, gauges
            known.history.append((known.seen, counts.get("env_frames", 0.0)))
            self._periodic.log({name: np.asarray(values) for name, values in logs.items()})
            if self._orders["phase"] == RUNNING:
                self._periodic.tick(self._frames, self._program_logs)
                if self._frames >= self._experiment.frames:
                    self._move_to(SAVING)
            known.left = self._orders["phase"] == OVER or "ended" in counts
            self._changed.notify_all()
            return self._answer()

    @remote(idempotent=True)
    def saved(self) -> None:
        """Hears from the learner that the last checkpoint is written."""
        with self._lock:
            self._periodic.finish(self._frames, self._program_logs())
            self._move_to(OVER if self._interrupted else JUDGING)

    @remote()
    def judged(
        self,
        env_frames: int,
        returns: np.ndarray,
        lengths: np.ndarray,
        last: bool,
        opponents: Sequence[str] = (),
    ) -> None:
        """Hears from the evaluator what it found, and, at the last, files the result."""
        with self._lock:
            evaluation = Evaluation(np.asarray(returns), np.asarray(lengths), tuple(opponents))
            self._logger.write(env_frames, as_logs(evaluation))
            if last:
                result = self._periodic.result(evaluation, self._frames, self._learner_steps)
                self._directory.write_result(result._asdict())
                self._move_to(OVER)

    @remote(idempotent=True)
    def interrupt(self, signal_number: int) -> str:
        """Asks for the end: a checkpoint, no evaluation; returns the phase from now on."""
        with self._lock:
            self._interrupted = signal_number
            if self._orders["phase"] == RUNNING and "learner" in self._nodes:
                self._move_to(SAVING)
            elif self._orders["phase"] != SAVING:  # there is nothing to save, or no need
                self._move_to(OVER)
            return str(self._orders["phase"])

    @remote(idempotent=True)
    def status(self) -> dict[str, Any]:
        """Returns what a display shows: orders, frames, the newest logs, and every node."""
        with self._lock:
            nodes = {name: self._shown(node) for name, node in sorted(self._nodes.items())}
            return {**self._answer(), "logs": dict(self._newest.logs), "nodes": nodes}

    @remote(idempotent=True)
    def relocate(self, node: str, address: str) -> None:
        """Hears from the launcher that a node answers elsewhere now."""
        with self._lock:
            self._addresses[node] = address

    @remote(idempotent=True)
    def locate(self, node: str) -> str:
        """Returns where a node answers now, nothing if it is where it was from the start."""
        with self._lock:
            return self._addresses.get(node, "")

    def wait_until_over(self, timeout: float) -> bool:
        """Waits for the last phase; says whether it has come."""
        with self._lock:
            return self._changed.wait_for(lambda: self._orders["phase"] == OVER, timeout)

    def wait_until_left(self, timeout: float) -> bool:
        """Waits until every node has left, or knows that it should; says whether that is so.

        It never is after an interruption: there may be nodes that have not reported yet.
        """
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._interrupted and all(node.left for node in self._nodes.values()),
                timeout,
            )

    @property
    def interrupted(self) -> int:
        """The signal that asked for the end, 0 for none."""
        return self._interrupted

    def _lost_with(self, node: _Node) -> float:
        """Frames of unrolls that an incarnation had begun, and of its last moment unreported."""
        frames = int(node.counts.get("env_frames", 0))
        if not frames:
            return 0.0
        num_envs = self._experiment.env.num_envs
        begun = frames // num_envs % self._experiment.replay.unroll_length * num_envs
        return begun + REPORT_SECONDS * node.frames_per_second()

    def _due(self, what: str) -> None:
        self._orders[what] += 1

    def _answer(self) -> dict[str, Any]:
        return {**self._orders, "env_frames": self._frames}

    def _move_to(self, phase: str) -> None:
        self._orders["phase"] = phase
        self._changed.notify_all()

    def _shown(self, node: _Node) -> dict[str, float | str]:
        """What a display says of a node."""
        silent = time.monotonic() - node.seen > _SILENT
        shown: dict[str, float | str] = {
            "state": "silent" if silent else "up",
            "pid": node.pid,
            "restarts": node.incarnation,
        }
        if "env_frames" in node.counts:
            shown["frames/s"] = node.frames_per_second()
        if "params/version" in node.gauges:
            shown["lag"] = max(0, self._learner_steps - node.gauges["params/version"])
        waits = [value for name, value in node.gauges.items() if name.endswith("wait_seconds")]
        if waits:
            shown["waited s"] = sum(waits)
        return shown

    def _program_logs(self) -> dict[str, float]:
        """Means of the gauges, and how often nodes were restarted."""
        values: dict[str, list[float]] = collections.defaultdict(list)
        for node in self._nodes.values():
            for name, value in node.gauges.items():
                values[name].append(value)
            if "params/version" in node.gauges:
                values["params/lag"].append(self._learner_steps - node.gauges["params/version"])
        return {
            "learner/steps": self._learner_steps,
            "program/restarts": sum(node.incarnation for node in self._nodes.values()),
            "program/lost_frames": self._lost_frames,
            **{name: float(np.mean(found)) for name, found in values.items()},
        }
