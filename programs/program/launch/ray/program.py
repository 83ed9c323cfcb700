"""Runs a program's nodes on the hosts of a Ray cluster, each in a process of Ray's.

Ray places and watches the processes. Nodes call one another without Ray, at addresses that the
launcher binds once Ray has placed each node.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from rlstack.programs.program import base
from rlstack.programs.program.base import Setup
from rlstack.programs.program.launch.monitor import ProgramMonitor
from rlstack.programs.program.launch.ray import cluster
from rlstack.programs.program.launch.ray.nodes import (
    ENDED,
    PAUSED,
    PLACING,
    RUNNING,
    RayNode,
    RayNodes,
)
from rlstack.programs.program.launch.ray.runner import Placement
from rlstack.programs.program.supervisor import End, record_failure
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session import timing
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.signals import StopSignals


def run_ray(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes on a cluster; returns the signal that was received, or 0."""
    program = setup.experiment.program
    setup.directory.node_logs.mkdir(exist_ok=True)
    policies, processes = len(setup.learning), setup.experiment.learner.processes
    with (
        StopSignals(display.write_line) as signals,
        cluster.joined(program, policies, processes) as ray,
        _token(setup.directory.path) as token_file,
    ):
        nodes = RayNodes(ray, setup, graph_of(setup), token_file)
        _RayProgram(setup, nodes, signals).run(display)
        return signals.received or 0


@contextlib.contextmanager
def _token(directory: Path) -> Iterator[Path]:
    """A file whose contents hosts read to show that they see the run directory."""
    path = directory / f".hosts-{secrets.token_hex(8)}"
    path.write_text(secrets.token_hex(16))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _record(setup: Setup, node: RayNode, end: End, pause: float | None) -> None:
    record_failure(
        str(setup.directory.failures),
        node=node.name,
        end=end,
        incarnation=node.incarnation,
        host=node.placement.host if node.placement else "",
        restarts=pause is not None,
        pause=pause,
    )


class _RayProgram:
    """The program, from placing its nodes to the end of the last."""

    def __init__(self, setup: Setup, nodes: RayNodes, signals: StopSignals) -> None:
        """Places nothing yet."""
        self._setup, self._nodes, self._signals = setup, nodes, signals
        self._coordinator = nodes.named("coordinator")
        self._monitor: ProgramMonitor | None = None
        self._moved: dict[str, str] = {}  # new addresses that the coordinator does not know yet
        self._ends_at = math.inf  # after the loss of a node that the program needs

    def run(self, display: ProgressDisplay) -> None:
        """Runs until the coordinator has ended, or until the program has lost what it needs."""
        try:
            if self._place_all():
                address = self._nodes.addresses["coordinator"]
                self._monitor = ProgramMonitor(address, display, self._setup.directory.failures)
                self._supervise()
            self._end()
        finally:
            for node in self._nodes.all:
                self._nodes.drop(node)
            if self._monitor is not None:
                self._monitor.close()

    def _place_all(self) -> bool:
        """Places all nodes, then starts all; returns False if a signal came first."""
        cfg, nodes = self._setup.experiment.program.ray, self._nodes
        for wave in nodes.waves():
            for node in wave:
                nodes.place(node, nodes.first_place(node))
            while any(node.state == PLACING and node.placement is None for node in wave):
                if self._signals.received:
                    return False
                for node, answer in nodes.answers(timing.LAUNCHER_POLL):
                    if not isinstance(answer, Placement):
                        reason = f"Ray started no process for {node.name}: {answer}"
                        raise ValueError(f"launch ray: {reason}")
                    nodes.bind(node, answer)
                for node in nodes.unplaced():
                    raise ValueError(
                        f"launch ray: a host must have {cluster.needs(cfg, node.group)} free "
                        f"for {node.name}; none had within {cfg.place_seconds:g} s. Add hosts, or "
                        "reserve less with --program.ray."
                    )
        for node in nodes.all:
            nodes.start(node)
        return True

    def _supervise(self) -> None:
        """Runs until the program is over or has lost a node that it needs."""
        interrupted_at = 0.0
        while self._coordinator.state != ENDED:
            for node, answer in self._nodes.answers(timing.LAUNCHER_POLL):
                self._handle(node, answer)
            for node in self._nodes.silent():
                self._fail(node, _lost("its host does not answer"))
            for node in self._nodes.unplaced():
                self._fail(node, _lost("Ray found no host for it in time"))
            now = time.monotonic()
            for node in self._nodes.all:
                if node.state == PAUSED and now >= node.until:
                    self._nodes.place(node, self._nodes.next_place(node))
                ended_for = now - node.since if node.state == ENDED else 0.0
                if ended_for > timing.RAY_CAUSE and not node.end_checked:
                    self._check_end(node)
            self._announce()
            if now > self._ends_at:
                return
            if self._signals.received and not interrupted_at:
                interrupted_at = now
                monitor = self._monitor
                if not monitor or monitor.interrupt(self._signals.received) != base.SAVING:
                    return
            if interrupted_at and now > interrupted_at + timing.INTERRUPTED:
                return

    def _handle(self, node: RayNode, answer: Placement | End | str | None) -> None:
        """Reacts to an answer of a node's process."""
        if isinstance(answer, Placement):
            try:
                self._nodes.bind(node, answer)
            except ValueError as error:
                self._nodes.avoid_host(node)
                self._fail(node, _lost(str(error)))
                return
            self._nodes.start(node)
            if node.name in self._nodes.addresses:
                self._moved[node.name] = self._nodes.addresses[node.name]
        elif isinstance(answer, End):
            if answer.reason:
                self._fail(node, answer)
            else:
                node.enter(ENDED)
        elif answer is not None:
            self._fail(node, _lost(answer))

    def _check_end(self, node: RayNode) -> None:
        """Fails a node that has ended while the program still runs."""
        assert self._monitor is not None
        node.end_checked = True
        if self._monitor.phase() == base.RUNNING:
            self._fail(node, _lost("it ended before the program did"))

    def _announce(self) -> None:
        """Tells the coordinator the addresses of nodes that have moved."""
        assert self._monitor is not None
        for name, address in list(self._moved.items()):
            if self._monitor.relocate(name, address):
                del self._moved[name]

    def _fail(self, node: RayNode, end: End) -> None:
        """Schedules a node's restart, or the end of the program."""
        lived = time.monotonic() - node.since
        self._nodes.drop(node)
        pause = node.restarts.failed(lived, end)
        _record(self._setup, node, end, pause)
        if pause is None:
            node.enter(ENDED)
            node.end_checked = True
            # The failure of another node may have caused this one, and may be noticed later.
            wait = timing.RAY_CAUSE if end.traceback else 0.0
            self._ends_at = min(self._ends_at, node.since + wait)
            return
        node.incarnation += 1
        node.enter(PAUSED)
        node.until, node.end_checked = node.since + pause, False

    def _end(self) -> None:
        """Asks all running nodes to end, and waits; `run` then kills those that have not ended."""
        running = [m for m in self._nodes.all if m.state == RUNNING]
        for node in running:
            self._nodes.stop(node)
        until = time.monotonic() + timing.RAY_GRACE
        while any(m.state == RUNNING for m in running) and time.monotonic() < until:
            for node, answer in self._nodes.answers(timing.LAUNCHER_POLL):
                if answer is not None:
                    node.enter(ENDED)


def _lost(reason: str) -> End:
    """Returns the end of a node whose process or host was lost."""
    return End(reason=reason, passing=True)
