"""The coordinator's node: counts frames, writes the logs, and tells every node what to do.

Nodes report a few times a second. The answer says in which phase the program is and how many
checkpoints and evaluations have become due since its start. Nothing is pushed to nodes, so a node
that is slow or restarting learns of everything at its next report.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstack.acting.evaluator import Evaluation
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.program.base import (
    EVALUATING,
    OVER,
    RUNNING,
    SAVING,
    NodeStatus,
    ProgramState,
    Setup,
    is_learner,
)
from rlstack.programs.program.heartbeat import Silences
from rlstack.programs.program.host import Report
from rlstack.programs.program.multi_policy.policies import Policies
from rlstack.programs.session import timing
from rlstack.programs.session.callbacks import EventLog, Events
from rlstack.programs.session.frames import FrameBudget, FrameRates
from rlstack.programs.session.metrics.figures import Node
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.programs.session.progress import Progress, open_logs
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import codec, remote
from rlstack.specs.masks import COUNTER
from rlstack.storage.loggers import Fanout, Logger, NewestLogs

_ENV_COUNTS = ("restarts", COUNTER)
_MAX_NOTES = 20  # lines that a display may not have shown yet
# With fewer actors each node reports by itself, which is sooner and costs the coordinator little.
TOGETHER = 32

_log = logging.getLogger(__name__)


def _reports_together(experiment: Experiment) -> bool:
    """Whether the nodes of each host report together."""
    program = experiment.program
    alone = program.launch == "threads" or program.pacing == "lock_step"
    return program.num_actors >= TOGETHER and not alone


class Notes:
    """Lines that a program's display shows, such as the restart of an environment's worker.

    They are the newest ones, numbered from 1; the oldest are forgotten. Any thread may add one.
    """

    def __init__(self, *, logged: bool = False) -> None:
        """Starts without lines.

        Args:
          logged: True to write the lines to the output of this process as well.
        """
        self._logged = logged
        self._lock = threading.Lock()
        self._lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=_MAX_NOTES)

    def add(self, text: str) -> None:
        """Adds a line."""
        if self._logged:
            _log.warning("%s", text)
        with self._lock:
            number = self._lines[-1][0] + 1 if self._lines else 1
            self._lines.append((number, text))

    def listed(self) -> list[list[int | str]]:
        """Returns the number and the text of each line."""
        with self._lock:
            return [[number, text] for number, text in self._lines]


class Coordinator:
    """The central state of one program; its public methods may be called from any thread."""

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDir,
        logger: Logger,
        start: Progress = Progress(),  # noqa: B008  (immutable)
        notes: Notes | None = None,
        listens: bool = False,
    ) -> None:
        """Starts the program's clock.

        Args:
          experiment: the experiment, which sets the budgets and periods.
          directory: the run directory, to which the result is written.
          logger: receives the logs, by frames.
          start: the progress of the earlier commands, if this one resumes a run.
          notes: lines for the display; other objects may add lines as well.
          listens: True if the command reads `events`.
        """
        self._experiment, self._directory = experiment, directory
        self._newest = NewestLogs()
        self._logger = Fanout([logger, self._newest])
        self._lock = threading.Lock()
        self._notes = Notes() if notes is None else notes
        self._changed = threading.Condition(self._lock)
        self._events = EventLog()
        self._periodic = PeriodicActions(
            experiment,
            self._logger,
            start=start,
            evaluate=lambda _: self._increment(evaluations=1),
            checkpoint=lambda _: self._increment(checkpoints=1),
            tell=self._notes.add,
            earlier=directory.metrics,
            events=Events(self._events.send, self._position) if listens else None,
        )
        together = secrets.token_hex(8) if _reports_together(experiment) else ""
        self._state = ProgramState(env_frames=start.env_frames, learners={}, together=together)
        self._policies = Policies(experiment)
        ahead = 4 if together else 2  # reports wait for others of their host, and so do answers
        self._budget = FrameBudget(experiment.all_frames, self._policies.unroll, ahead)
        self._learner_steps = dict.fromkeys(self._policies.learners, 0)
        self._rates = FrameRates()
        self._lost_frames = 0.0
        self._env_counts = {"restarts": 0}
        self._nodes: dict[str, NodeStatus] = {}
        self._addresses: dict[str, str] = {}
        self._interrupted = 0
        self._error: Exception | None = None  # that ends this node
        self._silences = Silences()

    @remote()
    def report(
        self,
        node: str,
        incarnation: int,
        pid: int,
        counts: Mapping[str, float],
        gauges: Mapping[str, float],
        logs: Mapping[str, Any],
        batch: int,
        number: int = 0,
    ) -> dict[str, Any]:
        """Processes a node's report, and returns the fields of the `ProgramState`.

        Args:
          node: the node's name, such as "actor/0".
          incarnation: number of restarts of the node.
          pid: the id of the node's process.
          counts: totals since the node last started. ``env_frames``, ``learner_steps`` and the
            counters of pools (``env_...``) are counted; ``ended`` marks the node's last report.
          gauges: current values, logged as means over the nodes that report them.
          logs: values to average, each a list of numbers.
          batch: the number of these logs, from 1. A node that got no answer sends them again.
          number: the number of the report, from 1; a late one counts for nothing. 0 if no report
            can be late.
        """
        with self._lock:
            report = Report(node, incarnation, pid, counts, gauges, logs, batch, number)
            granted = self._take(report)
            state = self._answer()
            if granted < 0:
                return state._replace(phase=OVER)._asdict()
            return state._replace(granted=granted)._asdict()

    @remote(idempotent=True)
    def report_all(self, reports: Sequence[bytes]) -> tuple[dict[str, Any], list[int]]:
        """Processes the reports of several nodes, as those of one host.

        Args:
          reports: the encoded arguments of `report`, with ``number``.

        Returns:
          The fields of the `ProgramState`, and the frames granted to each of these nodes; -1 for a
          node that was replaced, for which the program is over.
        """
        made = [Report(*codec.decode(report)) for report in reports]
        with self._lock:
            granted = [self._take(report) for report in made]
            return self._answer()._asdict(), granted

    def _take(self, report: Report) -> int:
        """Processes a report; returns the frames granted, -1 if the node was replaced."""
        node, incarnation, pid, counts, gauges, logs, batch, number = report
        self._silences.hear(node)
        known = self._nodes.get(node)
        if known is None:
            known = self._nodes[node] = NodeStatus(incarnation)
        if incarnation < known.incarnation:  # replaced, but perhaps still running
            return -1
        before = known.counts
        if incarnation > known.incarnation:
            self._lost_frames += self._frames_lost_with(node, known)
            known.incarnation, known.batch, known.number, before = incarnation, 0, 0, {}
        elif 0 < number <= known.number:  # it has arrived, or a later one has
            return known.granted
        if "env_frames" in counts:
            self._add_frames(node, int(counts["env_frames"] - before.get("env_frames", 0)))
        self._policies.add_frames(counts, before)
        for name in _ENV_COUNTS:
            if more := int(counts.get(f"env_{name}", 0) - before.get(f"env_{name}", 0)):
                self._env_counts[name] = self._env_counts.get(name, 0) + more
        if "learner_steps" in counts:
            self._learner_steps[self._policies.learner_of(node)] = int(counts["learner_steps"])
        known.pid, known.seen, known.number = pid, time.monotonic(), number
        known.counts, known.gauges = counts, gauges
        if batch > known.batch:  # else they have arrived, although the answer was lost
            known.batch = batch
            self._periodic.log({name: np.asarray(values) for name, values in logs.items()})
        if self._state.phase == RUNNING:
            with self._own_failures():
                self._periodic.tick(self._state.env_frames, self._program_logs)
            self._end_if_due()
        self._note_left(known, left=self._state.phase == OVER or "ended" in counts)
        made = int(counts.get("env_frames", -1))
        acts = made >= 0 and not is_learner(node)  # a learner counts frames of data
        total = self._state.env_frames
        known.granted = self._budget.grant(node, made, total, known.seen) if acts else 0
        return known.granted

    def _note_left(self, node: NodeStatus, *, left: bool) -> None:
        if left != node.left:
            node.left = left
            self._changed.notify_all()

    def _answer(self) -> ProgramState:
        """Returns the answer to a report, but for the frames granted."""
        there = self._policies.present(self._nodes, self._silences)
        waits = self._position()[1] < self._experiment.offline_updates
        progress = self._periodic.progress(self._state.env_frames)
        return self._state._replace(learners=there, learns_from_data=waits, **progress._asdict())

    @remote(idempotent=True)
    def newest_version(self, learner: str) -> int:
        """Returns the newest version of a learner's params that a node is known to have had."""
        with self._lock:
            return max(self._policies.in_use(learner, self._nodes), self._learner_steps[learner])

    @remote(idempotent=True)
    def alive(self, node: str) -> None:
        """Records a sign of life of a busy node."""
        with self._lock:
            self._silences.hear(node)

    @remote(idempotent=True)
    def saved(self) -> None:
        """The learner calls this once the last checkpoint is written."""
        with self._lock, self._own_failures():
            if self._state.phase == OVER or self._state.phase == EVALUATING:
                return  # a repeated call
            self._periodic.finish(self._state.env_frames, self._program_logs())
            self._enter(OVER if self._interrupted else EVALUATING)

    @remote()
    def note(self, node: str, text: str) -> None:
        """Adds a line to the display, such as the restart of an environment's worker."""
        self._notes.add(f"{node}: {text}")

    @remote()
    def evaluated(
        self,
        env_frames: int,
        returns: np.ndarray,
        lengths: np.ndarray,
        last: bool,
        opponents: Sequence[str] = (),
        cut: int = 0,
        metrics: Mapping[str, np.ndarray] | None = None,
        policies: Sequence[str] = (),
    ) -> None:
        """The evaluator calls this after each evaluation; the last one becomes the result."""
        with self._lock, self._own_failures():
            episodes = np.asarray(returns), np.asarray(lengths)
            evaluation = Evaluation(
                *episodes, tuple(opponents), cut, metrics or {}, tuple(policies)
            )
            if not last:
                self._periodic.evaluated(env_frames, evaluation)
                if self._state.phase == RUNNING:
                    self._end_if_due()
            else:
                frames, steps = self._position()
                each = self._policies.counters(frames, self._learner_steps)
                result = self._periodic.result(evaluation, frames, steps, each)
                self._periodic.evaluated(env_frames, evaluation)
                self._directory.write_result(result._asdict())
                self._enter(OVER)

    @remote(idempotent=True)
    def video_written(self, env_frames: int, path: str) -> None:
        """The evaluator calls this after it has written a video, for trackers."""
        self._logger.write_video(env_frames, Path(path))

    @remote(idempotent=True)
    def interrupt(self, signal_number: int) -> str:
        """Ends the program with a checkpoint but no evaluation; returns the phase from now on."""
        with self._lock:
            self._interrupted = signal_number
            if self._state.phase == RUNNING and self._policies.nodes <= self._nodes.keys():
                self._enter(SAVING)
            elif self._state.phase != SAVING:  # nothing to save, or saved already
                self._enter(OVER)
            return self._state.phase

    @remote(idempotent=True)
    def status(self) -> dict[str, Any]:
        """Returns what a display shows: the state, the newest logs, and every node."""
        with self._lock:
            now = time.monotonic()
            nodes = {
                name: node.shown(
                    self._learner_steps, self._rates.of(name, now), self._silences.of(name)
                )
                for name, node in sorted(self._nodes.items())
            }
            logs, notes = dict(self._newest.logs), self._notes.listed()
            return {**self._state._asdict(), "logs": logs, "nodes": nodes, "notes": notes}

    def figures(self) -> dict[str, Node]:
        """Returns what Prometheus shows of every node."""
        with self._lock:
            now, steps = time.monotonic(), self._learner_steps
            return {
                name: Node(
                    up=not node.left and self._silences.of(name) <= timing.SHOWN_AS_SILENT,
                    restarts=node.incarnation,
                    silence=self._silences.of(name),
                    frames_per_second=(
                        self._rates.of(name, now) if "env_frames" in node.counts else None
                    ),
                    lag=max(node.lags(steps).values(), default=None),
                )
                for name, node in sorted(self._nodes.items())
            }

    @remote(idempotent=True)
    def events(self, after: int, end: str) -> list[bytes]:
        """Returns the events after the one of this number, for callbacks, each encoded.

        Args:
          after: the number of the last event that was read.
          end: why training must end, as a callback says; empty while it goes on.
        """
        with self._lock:
            if end:
                self._periodic.end(end)
                if self._state.phase == RUNNING:
                    self._end_if_due()
            found = self._events.after(after)
            self._changed.notify_all()
        # One by one: the header of a message cannot describe the content of thousands.
        return [codec.encode(event) for event in found]

    def wait_until_read(self, timeout: float) -> bool:
        """Waits until all events have been read."""
        with self._lock:
            return self._changed.wait_for(self._events.is_read, timeout)

    @remote(idempotent=True)
    def relocate(self, node: str, address: str) -> None:
        """A launcher calls this when a node has moved to another address."""
        with self._lock:
            self._addresses[node] = address

    @remote(idempotent=True)
    def locate(self, node: str) -> str:
        """Returns a node's address if it has moved, else an empty string."""
        with self._lock:
            return self._addresses.get(node, "")

    def wait_until_over(self, timeout: float) -> bool:
        """Waits for the last phase; returns whether it has begun.

        Raises:
          OSError: a file of the run could not be written.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._error or self._state.phase == OVER, timeout)
            if self._error is not None:
                raise self._error
            return self._state.phase == OVER

    def check_learner(self, passed: float) -> None:
        """Checks that each learner still reports, and measures the silence of other nodes.

        Args:
          passed: seconds since the last check. Long times count little, because they mean that this
            process was stopped itself.

        Raises:
          NodeLostError: a learner has been silent for too long.
        """
        with self._lock:
            alive = [name for name, node in self._nodes.items() if not node.left]
            self._silences.count(alive, passed)
            self._silences.check(filter(is_learner, alive))

    def wait_until_left(self, timeout: float) -> bool:
        """Waits until every node has ended or knows that it should; returns False on a timeout.

        After an interruption it returns False: nodes that are starting may not have reported yet.
        """
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._interrupted and all(node.left for node in self._nodes.values()),
                timeout,
            )

    @property
    def interrupted(self) -> int:
        """The number of the signal that interrupted the program, 0 for none."""
        return self._interrupted

    @contextlib.contextmanager
    def _own_failures(self) -> Iterator[None]:
        """Makes errors of the body, such as a full disk, errors of this node, not of its caller."""
        try:
            yield
        except OSError as error:
            self._error = self._error or error
            self._changed.notify_all()

    def _position(self) -> tuple[int, int]:
        return self._state.env_frames, min(self._learner_steps.values())

    def _increment(self, *, checkpoints: int = 0, evaluations: int = 0) -> None:
        state = self._state
        self._state = state._replace(
            checkpoints=state.checkpoints + checkpoints,
            evaluations=state.evaluations + evaluations,
        )

    def _add_frames(self, node: str, frames: int) -> None:
        self._rates.count(node, frames, time.monotonic())
        self._state = self._state._replace(env_frames=self._state.env_frames + frames)

    def _end_if_due(self) -> None:
        """Ends training if a budget is spent or a stop rule says so."""
        if self._periodic.ended_by(*self._position()):
            self._enter(SAVING)

    def _enter(self, phase: str) -> None:
        self._state = self._state._replace(phase=phase)
        self._changed.notify_all()

    def _frames_lost_with(self, name: str, node: NodeStatus) -> float:
        """Estimates the frames that an incarnation made and the learner never sees.

        These are the frames of unrolls that it had begun and those since its last report.
        """
        frames = int(node.counts.get("env_frames", 0))
        if not frames:
            return 0.0
        num_envs, unroll = self._policies.num_envs, self._policies.unroll
        begun = frames // num_envs * num_envs % unroll
        return begun + timing.REPORT_PERIOD * self._rates.of(name, time.monotonic())

    def _program_logs(self) -> dict[str, float]:
        """Means of the gauges, and how often nodes were restarted."""
        values: dict[str, list[float]] = collections.defaultdict(list)
        for node in self._nodes.values():
            for name, value in node.gauges.items():
                values[name].append(value)
            for name, lag in node.lags(self._learner_steps).items():
                values[name].append(lag)
        _, steps = self._position()
        return {
            "learner/steps": steps,
            **self._policies.logs(self._learner_steps),
            **{f"env/{name}": count for name, count in self._env_counts.items()},
            "program/restarts": sum(node.incarnation for node in self._nodes.values()),
            "program/lost_frames": self._lost_frames,
            **{name: float(np.mean(found)) for name, found in values.items()},
        }


class CoordinatorNode(Coordinator):
    """A `Coordinator` that runs until the program is over. It ends last."""

    def __init__(self, setup: Setup, stop: threading.Event) -> None:
        """Opens the logs in the run directory."""
        experiment, directory = setup.experiment, setup.directory
        start = Progress.of(setup.restored)
        notes = Notes(logged=experiment.program.launch != "threads")  # they share one output
        self._logs = open_logs(directory, start, experiment, notes.add, self.figures)
        self._stop = stop
        super().__init__(experiment, directory, self._logs, start, notes, setup.listens)

    def run(self) -> None:
        """Waits for the end of the program, then until the other nodes know of it."""
        try:
            checked = time.monotonic()
            while not (self.wait_until_over(timing.PHASE_POLL) or self._stop.is_set()):
                now = time.monotonic()
                self.check_learner(now - checked)
                checked = now
            self.wait_until_left(timing.COORDINATOR_LINGER)
            self.wait_until_read(timing.EVENTS_LINGER)
        finally:
            self._logs.close()
