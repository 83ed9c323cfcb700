"""What every node has: the program's setup, and a client of the coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.acting.inference import Inference
from rlstack.agent import Agent
from rlstack.exploration import RunCounts
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.policies.members import divide
from rlstack.programs.build.restored import run_counts
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.member_config import HistoryConfig
from rlstack.programs.program.host import Answer as HostAnswer
from rlstack.programs.program.host import HostReports, Report
from rlstack.programs.program.stopping import EndedEarlyError, NodeLostError
from rlstack.programs.program.supervisor import INCARNATION
from rlstack.programs.session import timing
from rlstack.programs.session.profile import Updates
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import (
    ClosedError,
    RemoteError,
    RemoteObject,
    StoppedError,
    UnavailableError,
    codec,
)
from rlstack.rpc.socket_filter import address_towards
from rlstack.types import EnvSpec, Transition

LEARNER = "learner"  # the group of the learner's node, and with one policy its name

Answer = TypeVar("Answer")

# The phases of a program, in their order.
RUNNING = "running"  # actors act, the learner learns
SAVING = "saving"  # actors end; the learner saves and continues to publish params
EVALUATING = "evaluating"  # the evaluator evaluates the last params
OVER = "over"  # every node ends


@dataclasses.dataclass(frozen=True)
class Setup:
    """The arguments that all nodes of a program share."""

    experiment: Experiment
    directory: RunDir
    spec: EnvSpec  # spec of one environment
    restored: Path | None = None  # the checkpoint from which the program starts
    listens: bool = False  # whether the command has callbacks, which read the coordinator's events
    profiled: Updates | None = None  # the updates that nodes measure
    policy: str = ""  # name of one of several policies; the experiment is then this policy's
    older_runtime: bool | None = None  # XLA's older runtime in all nodes; None: see the experiment
    rows: int = 0  # with several policies: rows of one actor that learning policies play
    # The policies that play earlier versions of this one.
    histories: Mapping[str, HistoryConfig] = dataclasses.field(default_factory=dict)

    @property
    def learning(self) -> list[Setup]:
        """The setup of each policy that learns; with one policy, this one."""
        return self._several if self.experiment.policies else [self]

    @functools.cached_property
    def _several(self) -> list[Setup]:
        division = divide(self.experiment)
        older = self.experiment.older_runtime
        rows = sum(member.experiment.env.num_envs for member in division.learning)
        histories = {name: member.cfg.history for name, member in division.members.items()}
        return [
            dataclasses.replace(
                self,
                experiment=member.experiment,
                policy=member.name,
                older_runtime=older,
                rows=rows,
                histories={n: cfg for n, cfg in histories.items() if cfg.of == member.name},
            )
            for member in division.learning
        ]

    @property
    def prefix(self) -> str:
        """What precedes the names of logs; empty with one policy."""
        return f"{self.policy}/" if self.policy else ""

    def node(self, group: str) -> str:
        """Returns the name of the policy's node of a group: GROUP, or with several GROUP/POLICY."""
        return f"{group}/{self.policy}" if self.policy else group

    @property
    def learner_restarts(self) -> bool:
        """Whether a lost learner is restarted; only with several policies."""
        several = bool(self.policy or self.experiment.policies)
        return several and self.experiment.program.on_learner_loss == "restart"

    @functools.cached_property
    def step(self) -> Transition:
        """The `transition_spec`. Access it once before pickling, so that nodes find it cached."""
        return transition_spec(make_agent(self.experiment, self.spec), self.spec)

    @property
    def acting_seed(self) -> int:
        """The seed of environments and actions. A resumed run gets new ones."""
        seed = self.experiment.seed
        return role_seed(seed, f"after {self.restored.name}") if self.restored else seed

    def run_counts(self, state: ProgramState) -> RunCounts:
        """Returns the mean steps and episodes per environment, from the coordinator's answer."""
        one = self.rows or self.experiment.env.num_envs  # rows of one actor that count as frames
        envs = one * self.experiment.num_actors
        return run_counts(self.experiment, state.env_frames, state.episodes, envs)

    def configure_jax(self, *, single_thread: bool) -> None:
        """Configures XLA for this node; must come before JAX's first computation."""
        xla.configure_node(self.experiment, self.older_runtime, single_thread=single_thread)

    def configure_jax_of_threads(self) -> None:
        """Configures XLA for all nodes, which are threads of this process."""
        xla.configure_runs([self.experiment])

    def register_records(self, agent: Agent | None = None) -> None:
        """Lets this process decode messages with the agent's NamedTuples.

        Args:
          agent: the agent; None if no message has params. Its params are traced, which takes most
            of the time in which an actor starts.
        """
        codec.register(Inference)
        codec.register_records((self.step,))
        if agent is not None:
            key = jax.eval_shape(jax.random.PRNGKey, 0)
            codec.register_records((jax.eval_shape(agent.initial_params, key),))


class ProgramState(NamedTuple):
    """The coordinator's answer to a report."""

    phase: str = RUNNING
    env_frames: int = 0
    checkpoints: int = 0  # due since the program's start
    evaluations: int = 0  # due since the program's start
    # See rlstack.programs.session.progress for this field and the two that follow.
    train_seconds: float = 0.0
    timed_frames: int = 0
    episodes: int = 0
    granted: int = 0  # for an actor: frames since its (re)start at which it must report again
    # If learners may restart: the incarnation of each learner that is running, by name.
    learners: Mapping[str, int] = MappingProxyType({})
    learns_from_data: bool = False  # whether actors must wait for `Experiment.offline_updates`
    # A name by which the nodes of each host report together; empty if each reports by itself.
    together: str = ""


@dataclasses.dataclass
class NodeStatus:
    """The state of one node, from its reports."""

    incarnation: int = 0
    pid: int = 0
    seen: float = 0.0  # when it last reported
    left: bool = False  # whether it has ended, or knows that the program is over
    batch: int = 0  # the number of its last logs
    number: int = 0  # of its last report
    granted: int = 0  # the answer to that
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gauges: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def lags(self, learner_steps: Mapping[str, int]) -> dict[str, float]:
        """Returns the number of updates by which the node's params are behind, by name of the log.

        Args:
          learner_steps: updates of each learner, by the name of its node.
        """
        found = {}
        for name, version in self.gauges.items():
            prefix, word, rest = name.partition("params/version")
            if word and not rest:
                learner = f"{LEARNER}/{prefix}".rstrip("/")
                found[f"{prefix}params/lag"] = learner_steps.get(learner, 0) - version
        return found

    def shown(
        self, learner_steps: Mapping[str, int], frames_per_second: float, silence: float
    ) -> dict[str, float | str]:
        """Returns the values that a display shows.

        Args:
          learner_steps: updates of each learner; see `lags`.
          frames_per_second: the rate of this node, if it makes frames.
          silence: seconds since the node's last report.
        """
        shown: dict[str, float | str] = {
            "state": "silent" if silence > timing.SHOWN_AS_SILENT else "up",
            "pid": self.pid,
            "restarts": self.incarnation,
        }
        if "env_frames" in self.counts:
            shown["frames/s"] = frames_per_second
        if lags := self.lags(learner_steps):
            shown["lag"] = max(0, *lags.values())
        waits = [value for name, value in self.gauges.items() if name.endswith("wait_seconds")]
        if waits:
            shown["waited s"] = sum(waits)
        return shown


class CoordinatorClient:
    """Reports to the coordinator a few times a second and holds its last answer.

    In large programs it does so together with the other nodes of its host (`HostReports`), except
    for its first and last reports, those that cannot wait, and those of learners.

    A client belongs to one thread, in which it can be found by `check_end`.

    Attributes:
      began: when the coordinator first answered; None before.
      gauges: returns the current values that a report sends; called for each report.
      incarnation: number of restarts of this node.
      has_lasting_work: True if some of this node's work survives a restart.
    """

    def __init__(
        self, coordinator: RemoteObject, node: str, stop: threading.Event, prefix: str = ""
    ) -> None:
        """Makes the client; it sends its first report later.

        Args:
          coordinator: a client of the coordinator's node.
          node: the name of this node.
          stop: set by the launcher to end this node.
          prefix: precedes the names of all logs and gauges.
        """
        self._coordinator, self._node, self._stop = coordinator, node, stop
        self._prefix = prefix
        lost = timing.COORDINATOR_LOST if is_learner(node) else timing.COORDINATOR_LOST_TO_OTHERS
        self._patience = getattr(_thread, "coordinator_lost", None) or lost
        self.gauges: Callable[[], Mapping[str, Any]] = dict
        self.incarnation = incarnation()
        self.has_lasting_work = True
        self._counts: dict[str, float] = {}
        self._logs: dict[str, list[np.ndarray]] = {}
        self._unanswered: dict[str, np.ndarray] = {}  # logs that may have arrived
        self._batch = 0  # their number
        self._number = self._answered = 0  # of the last report, and of the last that was answered
        self._first_number = 0  # of the first report with these logs
        self._host: HostReports | None = None
        self._posted: float | None = None  # since when reports to it have had no answer
        self._next_look = 0.0
        self._state = ProgramState()
        self._next_report = 0.0
        self._silent_seconds = 0.0  # since the last answer, as far as this process ran
        self._last_attempt = time.monotonic()
        self.began: float | None = None
        self._dismissed = False  # whether the learner told this node to end
        self._lost = False  # whether the coordinator is
        _thread.client = self

    def count(self, **totals: float) -> None:
        """Sets totals since this incarnation began."""
        self._counts.update(totals)

    def log(self, logs: Mapping[str, Any] | None, prefix: str = "") -> None:
        """Adds values to be averaged: numbers, or vectors whose entries count one by one."""
        for name, value in (logs or {}).items():
            name = f"{self._prefix}{prefix}{name}"
            self._logs.setdefault(name, []).append(np.atleast_1d(np.asarray(value)))

    def note(self, text: str) -> None:
        """Shows a line on the program's display, if the coordinator answers."""
        with contextlib.suppress(UnavailableError):
            self._coordinator.note(self._node, text)

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Shows a text while the body runs, if that takes more than 2 seconds.

        In a group of numbered nodes only node 0 shows it, because all of them do the same.
        """
        timer = threading.Timer(timing.PHASE_SHOWN, self._show_phase, (f"{text} ...",))
        timer.daemon = True
        if self._node.endswith("/0") or not self._node[-1].isdecimal():
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _show_phase(self, text: str) -> None:
        # The program may end meanwhile, and with it the keys of its transport (ValueError).
        with contextlib.suppress(RemoteError, ClosedError, ValueError):
            self.note(text)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Adds values to be averaged; makes this client a `rlstack.types.LogWriter`."""
        del step  # the coordinator logs by the frames of the whole program
        self.log(logs)

    def poll(self, *, now: bool = False, waits: bool = False) -> ProgramState:
        """Returns the newest state; first reports if a report is due.

        Args:
          now: reports in any case, and waits for the answer.
          waits: reports sooner, because the caller waits for a later state.
        """
        if self._lost or self._stop.is_set():
            return self._state._replace(phase=OVER)
        clock = time.monotonic()
        due = now or waits or clock >= self._next_report
        if due:
            self._next_report = clock + timing.REPORT_PERIOD
        if self._host is not None and not now:
            self._report_together(self._host, clock, due, waits)
        elif due:
            self._report(clock)
        return self._state

    def wait_for(self, call: Callable[[], Answer]) -> Answer:
        """Calls another node until it answers, for as long as the program runs.

        While a program starts, the other node may start much later than this one.

        Raises:
          rlstack.rpc.StoppedError: the program ended first.
        """
        while self.poll().phase == RUNNING:
            with contextlib.suppress(UnavailableError):
                return call()
        raise StoppedError(f"{self._node}: the program ended while this node started")

    def answered(self) -> ProgramState:
        """Returns the newest state; waits for the coordinator's first answer.

        Raises:
          rlstack.rpc.StoppedError: the program ended first.
        """
        while (state := self.poll()).phase == RUNNING and self.began is None:
            time.sleep(timing.PHASE_POLL)
        if self.began is None:
            raise StoppedError(f"{self._node}: the program ended while this node started")
        return state

    def report_end(self) -> None:
        """Sends the last report; the coordinator no longer waits for this node."""
        self.count(ended=1)
        self.poll(now=True)
        if self._logs:  # it may have been a repetition
            self.poll(now=True)

    def dismiss(self) -> None:
        """Notes that the learner told this node to end, perhaps before the coordinator does."""
        self._dismissed = True

    def ran_seconds(self) -> float:
        """Returns the seconds since this node's first report.

        If a restart would lose all of the node's work, returns 0: the same error would come back,
        however late it is.
        """
        if self.began is None or not self.has_lasting_work:
            return 0.0
        return time.monotonic() - self.began

    def check_end(self) -> None:
        """Checks that this node may end now.

        Raises:
          NodeLostError: the node ends because the coordinator did not answer.
          EndedEarlyError: nobody has told it to end.
        """
        if self._lost:
            raise NodeLostError(
                "coordinator",
                f"it has not answered {self._node} for {self._silent_seconds:.0f} s; it, or its "
                "host, hangs or was stopped",
            )
        told = self._dismissed or self._stop.is_set() or self._state.phase != RUNNING
        if not told and self.poll(now=True).phase == RUNNING:
            raise EndedEarlyError(f"{self._node} ended although the program still runs")

    def close(self) -> None:
        """Leaves the host's folder of reports; call it when the node has ended."""
        if self._host is not None:
            self._host.close()
            self._host = None

    def _compose(self) -> Report:
        if not self._unanswered and self._logs:
            self._unanswered = {n: np.concatenate(values) for n, values in self._logs.items()}
            self._logs, self._batch = {}, self._batch + 1
            self._first_number = self._number + 1
        gauges = {self._prefix + name: float(value) for name, value in self.gauges().items()}
        self._number += 1
        return Report(
            self._node,
            self.incarnation,
            os.getpid(),
            self._counts,
            gauges,
            self._unanswered,
            self._batch,
            self._number,
        )

    def _report(self, clock: float) -> None:
        try:
            answer = self._coordinator.report(*self._compose())
        except UnavailableError:
            self._miss()
            return
        self._hear(clock, self._number, ProgramState(**answer))
        self._join_host()

    def _report_together(self, host: HostReports, clock: float, due: bool, waits: bool) -> None:
        try:
            if due:
                host.post(self._compose())
                self._posted = clock if self._posted is None else self._posted
            elif clock < self._next_look:
                return
            self._next_look = clock + timing.REPORTS_LOOK
            period = timing.REPORT_PERIOD_AT_LIMIT if waits else timing.REPORT_PERIOD
            answer = host.look(period)
        except UnavailableError:
            self._miss()
            return
        except OSError:  # no space
            self._report(clock)
            return
        if answer is not None and answer.number > self._answered:
            self._hear(clock, answer.number, _state_of(answer))
        elif self._posted is not None and clock > self._posted + timing.SHARED_PARAMS:
            self._report(clock)  # the one that sends hangs

    def _join_host(self) -> None:
        """Reports together with the other nodes of this host from now on, if the answer says so."""
        name = self._state.together
        if not name or self._host is not None or is_learner(self._node):
            return
        with contextlib.suppress(OSError):  # then this node reports by itself
            here = address_towards(self._coordinator.host)
            self._host = HostReports(f"{name}-{here}", self._node, self._coordinator.report_all)

    def _miss(self) -> None:
        """Counts an attempt that got no answer."""
        # The clock is read again because the call itself may have waited. An attempt that
        # lasted longer than calls may last shows that this process was stopped meanwhile.
        now = time.monotonic()
        self._silent_seconds += min(now - self._last_attempt, timing.ATTEMPT)
        self._last_attempt = now
        starting = self.began is None and not self.incarnation
        if self._silent_seconds > (timing.START if starting else self._patience):
            self._lost, self._state = True, self._state._replace(phase=OVER)

    def _hear(self, clock: float, number: int, state: ProgramState) -> None:
        """Takes the answer to the report of this number."""
        if number >= self._first_number:
            self._unanswered = {}
        self._answered = number
        self._posted = None if number == self._number else clock
        self._silent_seconds, self._last_attempt = 0.0, clock
        self.began = clock if self.began is None else self.began
        self._state = state


def _state_of(answer: HostAnswer) -> ProgramState:
    state = ProgramState(**answer.state)
    replaced = answer.granted < 0
    return state._replace(granted=answer.granted, phase=OVER if replaced else state.phase)


def is_learner(node: str) -> bool:
    """Whether a node is a learner, by its name."""
    return node.split("/")[0] == LEARNER


_thread = threading.local()


def check_end() -> None:
    """Calls `CoordinatorClient.check_end` of the client of this thread, if there is one."""
    client: CoordinatorClient | None = getattr(_thread, "client", None)
    if client is not None:
        client.check_end()


def close_client() -> None:
    """Calls `CoordinatorClient.close` of the client of this thread, if there is one."""
    client: CoordinatorClient | None = getattr(_thread, "client", None)
    if client is not None:
        client.close()


def ran_seconds() -> float:
    """Returns the seconds that the node of this thread has worked, without its start."""
    client: CoordinatorClient | None = getattr(_thread, "client", None)
    return 0.0 if client is None else client.ran_seconds()


def incarnation() -> int:
    """Returns the number of restarts of this node."""
    return getattr(_thread, "incarnation", None) or int(os.environ.get(INCARNATION, "0"))


def set_incarnation(number: int) -> None:
    """Sets `incarnation` for a node that runs in this thread of a process with several nodes."""
    _thread.incarnation = number


def set_coordinator_lost(seconds: float) -> None:
    """Replaces `timing.COORDINATOR_LOST` in this thread, for nodes that may be cut off longer."""
    _thread.coordinator_lost = seconds
