"""Runs a program's nodes on the hosts of a Ray cluster, each in a process of Ray's.

Ray places and watches the processes. Nodes call one another without Ray, at addresses that the
launcher binds once Ray has placed each node.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
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
    Answers,
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
        _RayProgram(setup, nodes, signals, display).run()
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

    def __init__(
        self, setup: Setup, nodes: RayNodes, signals: StopSignals, display: ProgressDisplay
    ) -> None:
        """Places nothing yet."""
        self._setup, self._nodes, self._signals = setup, nodes, signals
        self._display = display
        self._coordinator = nodes.named("coordinator")
        self._monitor: ProgramMonitor | None = None
        self._moved: dict[str, str] = {}  # new addresses that the coordinator does not know yet
        self._ends_at = math.inf  # after the loss of a node that the program needs
        self._has_head = True

    def run(self) -> None:
        """Runs until the coordinator ends, or until the program loses a node that it needs."""
        try:
            if self._place_all():
                address = self._nodes.addresses["coordinator"]
                self._monitor = ProgramMonitor(
                    address, self._display, self._setup.directory.failures
                )
                self._supervise()
            self._end()
        finally:
            self._nodes.close()
            if self._monitor is not None:
                self._monitor.close()

    def _place_all(self) -> bool:
        """Places and starts all nodes; returns False if the program must end first."""
        cfg, nodes = self._setup.experiment.program.ray, self._nodes
        *called, callers = nodes.waves()
        for wave in (*called, callers):
            if wave is callers:  # the addresses of all that they and others call are known
                for node in (node for early in called for node in early):
                    nodes.start(node)
            for node in wave:
                nodes.place(node)
            while any(node.placement is None and not node.waits for node in wave):
                if self._signals.received or time.monotonic() > self._ends_at:
                    return False
                for node, answer in nodes.answers(timing.LAUNCHER_POLL):
                    if node.state != PLACING:
                        self._handle(node, answer)
                    elif isinstance(answer, Placement):
                        nodes.bind(node, answer)
                    else:
                        reason = f"Ray started no process for {node.name}: {answer}"
                        raise ValueError(f"launch ray: {reason}")
                for node in nodes.unplaced():
                    if self._lets_wait(node):
                        continue
                    raise ValueError(
                        f"launch ray: a host must have {cluster.needs(cfg, node.group)} free "
                        f"for {node.name}; none had within {cfg.place_seconds:g} s. Add hosts, or "
                        "reserve less with --program.ray."
                    )
        for node in callers:
            if node.placement is not None:
                nodes.start(node)
        return True

    def _lets_wait(self, node: RayNode) -> bool:
        """Lets a node wait for a host, if the program can run without it."""
        node.waits = self._nodes.can_wait(node)
        if node.waits:
            needs = cluster.needs(self._setup.experiment.program.ray, node.group)
            self._display.write_line(
                f"{node.name} waits for a host with {needs} free, and the program runs without it"
            )
        return node.waits

    def _supervise(self) -> None:
        """Runs until the program is over or has lost a node that it needs."""
        interrupted_at = 0.0
        while self._coordinator.state != ENDED:
            answers = self._nodes.answers(timing.LAUNCHER_POLL)
            if self._nodes.places.silence:
                self._wait_for_head(answers)
            else:
                for node, answer in answers:
                    self._handle(node, answer)
                self._restart()
            now = time.monotonic()
            if now > self._ends_at:
                return
            received = self._signals.received or (0 if self._has_head else signal.SIGTERM)
            if received and not interrupted_at:
                interrupted_at = now
                monitor = self._monitor
                if not monitor or monitor.interrupt(received) != base.SAVING:
                    return
            if interrupted_at and now > interrupted_at + timing.INTERRUPTED:
                return

    def _restart(self) -> None:
        """Places nodes again, and moves them."""
        for node in self._nodes.silent():
            self._fail(node, _lost("its host does not answer"))
        for node in self._nodes.unplaced():
            if not self._lets_wait(node):
                self._fail(node, _lost("Ray found no host for it in time"))
        if self._nodes.places.look():
            self._follow_hosts()
        now = time.monotonic()
        for node in self._nodes.all:
            if node.state == PAUSED and now >= node.until:
                self._nodes.place(node)
            if 0 < node.moves < now:
                self._moved_away(node)
            ended_for = now - node.since if node.state == ENDED else 0.0
            if ended_for > timing.RAY_CAUSE and not node.end_checked:
                self._check_end(node)
        self._announce()

    def _wait_for_head(self, answers: Answers) -> None:
        """Lets nodes end, and restarts none, while the head of the cluster does not answer.

        If it does not come back, the program ends, and saves first. Nodes run without it for a
        minute; then Ray ends all their processes and this one.
        """
        for node, answer in answers:
            is_well = isinstance(answer, End) and not answer.reason
            if is_well or isinstance(answer, Placement):
                self._handle(node, answer)
        silence = self._nodes.places.silence
        lost_seconds = self._setup.experiment.program.ray.lost_seconds
        if self._has_head and silence > min(lost_seconds, timing.RAY_HEAD):
            self._has_head = False
            end = _lost(
                f"it has not answered for {silence:.0f} s, and without the head of the cluster Ray "
                "ends all processes. Start the cluster again, then --resume"
            )
            path = str(self._setup.directory.failures)
            record_failure(path, node="head", end=end, restarts=False)

    def _handle(self, node: RayNode, answer: Placement | End | str | None) -> None:
        """Reacts to an answer of a node's process."""
        if isinstance(answer, Placement):
            wanted = node.host
            try:
                self._nodes.bind(node, answer)
            except ValueError as error:
                self._nodes.places.avoid(node)
                self._fail(node, _lost(str(error)))
                return
            if wanted and wanted != node.host:
                self._nodes.places.refused()
            self._nodes.start(node)
            if node.name in self._nodes.addresses:
                self._moved[node.name] = self._nodes.addresses[node.name]
        elif node.moves and answer is not None:
            self._moved_away(node)
        elif isinstance(answer, End):
            if answer.reason:
                self._fail(node, answer)
            else:
                node.enter(ENDED)
        elif answer is not None:
            self._fail(node, _lost(answer))

    def _follow_hosts(self) -> None:
        """Moves nodes off hosts that will leave the cluster, and actors to hosts that have joined.

        Without the nodes that cannot move, the program ends; its learner saves first.
        """
        places, nodes = self._nodes.places, self._nodes.all
        for node in nodes:
            if node.state != RUNNING or node.moves or not places.is_leaving(node.host):
                continue
            if node.definition.restartable and not places.is_here(node):
                self._move(node, "its host will leave the cluster")
            elif node.host == places.here:  # with this command
                self._signals.received = self._signals.received or signal.SIGTERM
            elif self._ends_at == math.inf:
                _record(self._setup, node, _lost("its host will leave the cluster"), None)
                self._ends_at = 0.0
        rests = all(node.state in (RUNNING, ENDED) and not node.moves for node in nodes)
        rests = rests and self._setup.experiment.program.pacing != "lock_step"
        if rests and (actor := places.to_move(nodes)) is not None:
            self._move(actor, "a host has joined the cluster")

    def _move(self, node: RayNode, why: str) -> None:
        """Asks a node to end, to be placed on another host; this is no failure."""
        assert node.placement is not None
        self._display.write_line(f"{node.name} leaves {node.placement.host}: {why}")
        self._nodes.stop(node)
        node.moves = time.monotonic() + timing.RAY_GRACE

    def _moved_away(self, node: RayNode) -> None:
        """Places a node that has ended, or has not ended in time, on another host."""
        self._nodes.drop(node)
        node.incarnation += 1
        node.enter(PAUSED)
        node.until, node.end_checked = node.since, False

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
        if node.definition.restartable and self._nodes.places.is_gone(node):
            pause: float | None = 0.0  # which says nothing about the node
        else:
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
