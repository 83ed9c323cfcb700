"""The nodes of a program on a Ray cluster: placing, starting, watching and ending each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import cloudpickle

from rlstack.programs.program.base import Setup
from rlstack.programs.program.graph import Graph, Node
from rlstack.programs.program.launch.ray import cluster
from rlstack.programs.program.launch.ray.places import Places
from rlstack.programs.program.launch.ray.runner import NodeRunner, Placement, Watched, last_of_log
from rlstack.programs.program.launch.wiring import Program, indexed
from rlstack.programs.program.supervisor import End, RestartPolicy
from rlstack.programs.session import timing
from rlstack.rpc import addresses, transports, versions

PLACING, RUNNING, ENDED, PAUSED = "placing", "running", "ended", "paused"


@dataclasses.dataclass
class RayNode:
    """One node of the program and its current process."""

    definition: Node
    index: int  # index of the node in its group
    restarts: RestartPolicy
    incarnation: int = 0
    state: str = PAUSED
    since: float = 0.0  # when the state began
    last_answer: float = 0.0  # when its process last answered
    until: float = 0.0  # when a pause ends: before a restart, or before the next call
    runner: Any = None  # Ray's handle of its process
    call: Any = None  # Ray's reference to the pending answer
    placement: Placement | None = None
    host: str = ""  # Ray's id of the host for which it is meant or on which it is; "" for none
    log: str = ""  # the file with its output on a host that does not see the run directory
    log_at: int = 0  # the bytes of it that the run directory has
    started: bool = False  # whether its process has answered since the start
    waits: bool = False  # whether it waits for a host while the program runs without it
    moves: float = 0.0  # when it must have ended to be placed on another host; 0: it stays
    end_checked: bool = False  # whether it is known why the node ended

    @property
    def name(self) -> str:
        """The node's name, as in failures and logs."""
        return self.definition.name

    @property
    def group(self) -> str:
        """The nodes that do the same work."""
        return self.definition.group

    def enter(self, state: str) -> None:
        """Changes the state."""
        self.state, self.since = state, time.monotonic()


# Nodes, and of each a `Placement`, an `End`, None if it still runs, or the reason, as text, why its
# process is lost.
Answers = list[tuple[RayNode, Placement | End | str | None]]


class RayNodes:
    """All nodes of a program, with the operations by which the launcher controls them.

    Attributes:
      all: the nodes.
      addresses: addresses of the nodes that others call; only placed nodes have one.
      places: the hosts.
    """

    def __init__(self, ray: Any, setup: Setup, graph: Graph, token_file: Path) -> None:
        """Makes the nodes' records; `place` starts their processes.

        Args:
          ray: the package, connected to the cluster.
          setup: the program's setup.
          graph: the program's nodes.
          token_file: a file that processes read to show that they see the run directory.
        """
        self._ray, self._setup, self._token_file = ray, setup, token_file
        self._cfg = setup.experiment.program.ray
        self._token = token_file.read_text()
        self._sent: tuple[str, bytes] | None = None
        if setup.directory.is_stored:
            self._sent = self._token, transports.secret()
        self.places = Places(ray, self._cfg, stored=setup.directory.is_stored)
        self.addresses: dict[str, str] = {}
        self._program = Program(graph.nodes, setup, self.addresses)
        self._last: dict[Any, RayNode] = {}  # Ray's references to the ends of logs
        self.all: list[RayNode] = []
        for node, index in indexed(graph):
            limit = setup.experiment.program.max_restarts if node.restartable else 0
            self.all.append(RayNode(node, index, RestartPolicy(limit, *timing.RESTARTS)))

    def named(self, name: str) -> RayNode:
        """Returns a node."""
        return next(node for node in self.all if node.name == name)

    def waves(self) -> list[list[RayNode]]:
        """Returns the nodes in the order in which they are placed.

        A leader's host must be known before its followers', and what must be on this host comes
        before what could fill it. So actors come last, without which a program may start.
        """

        def wave(node: RayNode) -> int:
            if self.places.is_here(node):
                return 0
            leads = any(self._cfg.host_group(other.group) == node.group for other in self.all)
            if node.group == "actor" and not leads:
                return 3
            return 1 + bool(self._cfg.host_group(node.group))

        return [[node for node in self.all if wave(node) == number] for number in range(4)]

    def place(self, node: RayNode) -> None:
        """Asks Ray for a process for the node; `answers` later returns its `Placement`."""
        choose = self.places.next if node.incarnation else self.places.first
        node.host, where = choose(node, self.all)
        node.placement = None
        reserved = cluster.reserved(self._cfg, node.group)
        cls = self._ray.remote(NodeRunner).options(**reserved, scheduling_strategy=where)
        node.runner = cls.remote()
        ports = int(node.definition.kind != "worker")
        program = self._setup.experiment.program
        node.call = node.runner.prepare.remote(
            str(self._token_file),
            ports,
            program.interface,
            transports.variables(),
            program.port_range,
            self._sent,
        )
        node.enter(PLACING)
        node.started = False

    def bind(self, node: RayNode, placement: Placement) -> None:
        """Binds the addresses of a node to the host of its process.

        Raises:
          ValueError: the host does not see the run directory, or has another version of rlstack.
        """
        node.placement, node.host, node.waits = placement, placement.node_id, False
        theirs = placement.versions or b"older unknown"
        if wrong := versions.differences(theirs, placement.host):
            raise ValueError(f"launch ray: {wrong}")
        if placement.token != self._token:
            raise ValueError(
                f"launch ray: every host must see the run directory at the same path; "
                f"{placement.host} finds {placement.token or 'nothing'} at {self._token_file}. "
                "Choose a directory on a shared file system with --run-dir."
            )
        for port in placement.ports:
            self.addresses[node.name] = addresses.join(placement.host, port)

    def start(self, node: RayNode) -> None:
        """Starts a node; its addresses, and those of all nodes it calls, must be bound."""
        coordinator_lost = 2.0 * self._cfg.lost_seconds
        node.call = node.runner.start.remote(
            cloudpickle.dumps(self._program),
            node.name,
            node.incarnation,
            coordinator_lost,
            str(self._log_of(node)),
        )
        self._record_placement(node)
        node.enter(RUNNING)
        node.last_answer = node.since

    def _log_of(self, node: RayNode) -> Path:
        return self._setup.directory.node_logs / node.group / str(node.index)

    def _record_placement(self, node: RayNode) -> None:
        """Adds a line on where a node runs to the log ``hosts.jsonl``."""
        assert node.placement is not None
        placement = node.placement._asdict()
        del placement["token"], placement["versions"]
        record = {"time": time.time(), "node": node.name, "incarnation": node.incarnation}
        with open(self._setup.directory.node_logs / "hosts.jsonl", "a") as file:
            file.write(json.dumps(record | placement) + "\n")

    def answers(self, timeout: float) -> Answers:
        """Waits for answers of processes, and returns them."""
        now = time.monotonic()
        self.take_logs(0.0)
        for node in self.all:
            if node.call is None and node.state == RUNNING and now > node.until:
                node.call = node.runner.watch.remote(timing.RAY_WATCH_CALL, node.log_at)
        asked = {node.call: node for node in self.all if node.call is not None}
        if not asked:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
        found = []
        for call in ready:
            node = asked[call]
            node.call = None
            try:
                answer = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                cut_off = isinstance(error, self._ray.exceptions.ActorUnavailableError)
                if cut_off and node.started:  # perhaps only briefly
                    node.until = time.monotonic() + timing.RAY_RETRY
                    continue
                answer = _describe(error)
            if isinstance(answer, Watched):
                node.log, node.log_at = answer.log, answer.at
                self._append(node, answer.output)
                answer = answer.end
            node.last_answer, node.started = time.monotonic(), node.state == RUNNING
            found.append((node, answer))
        return found

    def silent(self) -> list[RayNode]:
        """Returns the nodes whose processes have stopped answering; avoids their hosts."""
        limit = time.monotonic() - timing.RAY_WATCH_CALL - self._cfg.lost_seconds
        found = [m for m in self.all if m.state == RUNNING and m.last_answer < limit]
        for node in found:
            self.places.avoid(node)
        return found

    def unplaced(self) -> list[RayNode]:
        """Returns the nodes that Ray has not placed in time, the hardest to place first."""
        limit = time.monotonic() - self._cfg.place_seconds
        found = [
            node
            for node in self.all
            if node.state == PLACING and node.call and node.since < limit and not node.waits
        ]
        return sorted(found, key=lambda node: len(self.places.fitting(node)))

    def can_wait(self, node: RayNode) -> bool:
        """Whether the program goes on without a node that has no host: one of enough actors."""
        experiment = self._setup.experiment
        if node.group != "actor" or experiment.program.pacing == "lock_step":
            return False
        others = [m for m in self.all if m.group == "actor" and m.placement and m is not node]
        processes = experiment.learner.processes
        learn = {other.index % processes for other in others}  # the learners with data
        return len(learn) == processes and len(others) >= experiment.replay.min_actors

    def drop(self, node: RayNode) -> None:
        """Kills a node's process; one that is cut off ends when it is reachable again."""
        if node.runner is not None and not self.places.silence:  # for which it would wait
            with contextlib.suppress(Exception):  # already ended
                self._ray.kill(node.runner)
                if node.log:
                    self._last[self._last_of_log(node)] = node
        node.runner = node.call = None
        node.log, node.log_at = "", 0
        node.host, node.waits, node.moves = "", False, 0.0

    def _last_of_log(self, node: RayNode) -> Any:
        """Asks the host of a process that is gone for the end of its log."""
        assert node.placement is not None
        where = cluster.on_host(self._ray, node.placement.node_id, soft=False)
        reserved = cluster.reserved(self._cfg, node.group)
        options = {"num_cpus": 0, "max_retries": 0, "runtime_env": reserved["runtime_env"]}
        task = self._ray.remote(last_of_log).options(**options, scheduling_strategy=where)
        return task.remote(node.log, node.log_at)

    def close(self) -> None:
        """Kills all processes that are left, and takes the ends of their logs."""
        for node in self.all:
            self.drop(node)
        if not self.places.silence:
            self.take_logs(timing.RAY_LOGS)
        self.places.close()

    def take_logs(self, seconds: float) -> None:
        """Waits at most this long for the ends of logs of processes that are gone."""
        if not self._last:
            return
        asked = list(self._last)
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=seconds)
        for call in ready:
            node = self._last.pop(call)
            with contextlib.suppress(self._ray.exceptions.RayError):  # with its host
                self._append(node, self._ray.get(call)[0])

    def _append(self, node: RayNode, output: bytes) -> None:
        """Adds output of a node on another host to its log in the run directory."""
        if output:
            log = self._log_of(node)
            with contextlib.suppress(OSError):  # a full disk, of which the learner tells
                log.parent.mkdir(parents=True, exist_ok=True)
                with open(log, "ab") as file:
                    file.write(output)

    def stop(self, node: RayNode) -> None:
        """Asks a node to end."""
        if node.runner is not None:
            node.runner.stop.remote()


def _describe(error: Exception) -> str:
    """Returns the first lines of Ray's long message as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"
