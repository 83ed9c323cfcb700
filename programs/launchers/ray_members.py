"""The nodes of a program on a Ray cluster: where each is to go, and how it does there."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import cloudpickle

from programs.launchers import ray_cluster
from programs.launchers.ray_host import Berth, NodeHost, Outcome
from programs.nodes.line import Setup
from programs.nodes.supervise import Backoff

PLACING, RUNNING, ENDED, PAUSED = "placing", "running", "ended", "paused"
_WATCH_SECONDS = 3.0  # that a node's process lets one call wait
_PAUSE = 0.5  # seconds before a process that is cut off is asked again
_SHUN_SECONDS = 60.0  # for which a silent host gets no new nodes


@dataclasses.dataclass
class Member:
    """One node of the program, wherever it is just now."""

    node: Any  # Launchpad's
    group: str
    index: int  # in the group
    backoff: Backoff
    incarnation: int = 0
    state: str = PAUSED
    since: float = 0.0  # when the state began
    heard: float = 0.0  # when its process last answered
    until: float = 0.0  # when a pause ends, also one between two questions
    host: Any = None  # Ray's handle of its process
    call: Any = None  # Ray's reference to the answer that is awaited
    berth: Berth | None = None
    started: bool = False  # whether its process has said so
    settled: bool = False  # whether its end was in order

    @property
    def name(self) -> str:
        """As failures and logs have it."""
        return str(self.node.name)

    def enter(self, state: str) -> None:
        """Begins a state."""
        self.state, self.since = state, time.monotonic()


class Members:
    """All nodes; knows Ray, and nothing of why nodes come and go."""

    def __init__(self, ray: Any, setup: Setup, program: Any, token_file: Path) -> None:
        """Places nothing yet.

        Args:
          ray: the package, connected.
          setup: of the program.
          program: the Launchpad program.
          token_file: by which processes show that they see the run directory.
        """
        from launchpad import context

        self._ray, self._setup, self._token_file = ray, setup, token_file
        self._cfg = setup.experiment.program.ray
        self._token = token_file.read_text()
        self._shunned: dict[str, float] = {}  # hosts, until when
        self.all: list[Member] = []
        for group, nodes in program.groups.items():
            for index, node in enumerate(nodes):
                # Like a thread's: what is to be executed is the node's function.
                node._initialize_context(context.LaunchType.LOCAL_MULTI_THREADING, None)
                limit = setup.experiment.program.max_restarts if node.restartable else 0
                self.all.append(Member(node, group, index, Backoff(limit)))

    def named(self, name: str) -> Member:
        """Returns a node."""
        return next(member for member in self.all if member.name == name)

    def place(self, member: Member, where: Any) -> None:
        """Asks Ray for a process for the node; `answers` has its `Berth` in time."""
        reserved = ray_cluster.reserved(self._cfg, member.group)
        cls = self._ray.remote(NodeHost).options(**reserved, scheduling_strategy=where)
        member.host = cls.remote()
        ports = len(member.node.addresses)
        interface = self._setup.experiment.program.interface
        member.call = member.host.prepare.remote(str(self._token_file), ports, interface)
        member.enter(PLACING)
        member.started = False

    def first_place(self, member: Member) -> Any:
        """Returns Ray's strategy for a node at the start."""
        leader = self._leader(member)
        if leader is None or leader.berth is None:
            return "SPREAD"
        return ray_cluster.on_host(self._ray, leader.berth.node_id, soft=False)

    def _leader(self, member: Member) -> Member | None:
        group = self._cfg.beside(member.group)
        leaders = [other for other in self.all if other.group == group]
        return leaders[member.index % len(leaders)] if leaders else None

    def next_place(self, member: Member) -> Any:
        """Returns Ray's strategy for a node that was lost: where there is least of the program."""
        now = time.monotonic()
        fit = [host for host in self._room(member) if self._shunned.get(host, 0.0) < now]
        if not fit:
            return "SPREAD"
        berths = [m.berth for m in self.all if m.berth and m is not member and m.state == RUNNING]
        here = collections.Counter(berth.node_id for berth in berths)
        leader = self._leader(member)
        if leader is not None and leader.berth is not None and leader.berth.node_id in fit:
            return ray_cluster.on_host(self._ray, leader.berth.node_id, soft=True)
        return ray_cluster.on_host(self._ray, min(fit, key=lambda i: here[i]), soft=True)

    def _room(self, member: Member) -> list[str]:
        """Returns the hosts that are large enough for a node, were they empty."""
        reserved = ray_cluster.reserved(self._cfg, member.group)
        kinds = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        return [
            host["NodeID"]
            for host in self._ray.nodes()
            if host["Alive"]
            and all(host["Resources"].get(kind, 0) >= reserved[o] for kind, o in kinds.items())
        ]

    def moor(self, member: Member, berth: Berth) -> None:
        """Binds the addresses of a node to where its process is.

        Raises:
          ValueError: the host does not see the run directory.
        """
        member.berth = berth
        if berth.token != self._token:
            raise ValueError(
                f"launch ray: every host must see the run directory at the same path; "
                f"{berth.host} finds {berth.token or 'nothing'} at {self._token_file}. Choose one "
                "on a shared file system with --run-dir."
            )
        for lp_address, port in zip(member.node.addresses, berth.ports, strict=True):
            lp_address.bind(_Fixed(f"{berth.host}:{port}"))

    def start(self, member: Member) -> None:
        """Starts a node whose addresses, and those of all it talks to, are bound."""
        node, setup = member.node, self._setup
        (executable,) = node.to_executables([node], member.group, node.launch_context)
        log = setup.directory.node_logs / member.group / str(member.index)
        give_up = 2.0 * self._cfg.lost_seconds
        member.call = member.host.start.remote(
            cloudpickle.dumps(executable), member.incarnation, give_up, str(log)
        )
        self._note(member)
        member.enter(RUNNING)
        member.heard = member.since

    def _note(self, member: Member) -> None:
        """Writes down where a node is, for people and tests."""
        assert member.berth is not None
        berth = member.berth._asdict()
        del berth["token"]
        record = {"time": time.time(), "node": member.name, "incarnation": member.incarnation}
        with open(self._setup.directory.node_logs / "hosts.jsonl", "a") as file:
            file.write(json.dumps(record | berth) + "\n")

    def _ask(self, member: Member) -> None:
        """Asks a node's process to say when the node ends; `answers` goes on asking."""
        member.call = member.host.watch.remote(_WATCH_SECONDS)

    def answers(self, timeout: float) -> list[tuple[Member, Berth | Outcome | str | None]]:
        """Waits for answers of processes.

        Returns:
          Each with its node: a `Berth`, an `Outcome`, None for a node that runs on, or in words why
          the process is lost.
        """
        now = time.monotonic()
        for member in self.all:
            if member.call is None and member.state == RUNNING and now > member.until:
                self._ask(member)
        asked = {member.call: member for member in self.all if member.call is not None}
        if not asked:
            time.sleep(timeout)
            return []
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
        found = []
        for call in ready:
            member = asked[call]
            member.call = None
            try:
                answer = self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                cut_off = isinstance(error, self._ray.exceptions.ActorUnavailableError)
                if cut_off and member.started:  # perhaps for a moment only
                    member.until = time.monotonic() + _PAUSE
                    continue
                answer = _in_words(error)
            member.heard, member.started = time.monotonic(), member.state == RUNNING
            found.append((member, answer))
        return found

    def silent(self) -> list[Member]:
        """Returns the nodes whose processes have not answered for long; their hosts are shunned."""
        limit = time.monotonic() - _WATCH_SECONDS - self._cfg.lost_seconds
        found = [m for m in self.all if m.state == RUNNING and m.heard < limit]
        for member in found:
            self.shun(member)
        return found

    def shun(self, member: Member) -> None:
        """Places nothing on the node's host for a while."""
        if member.berth is not None:
            self._shunned[member.berth.node_id] = time.monotonic() + _SHUN_SECONDS

    def unplaced(self) -> list[Member]:
        """Returns the nodes for which Ray has not found a place in time, the largest first."""
        limit = time.monotonic() - self._cfg.place_seconds
        found = [m for m in self.all if m.state == PLACING and m.call and m.since < limit]
        return sorted(found, key=lambda member: len(self._room(member)))

    def drop(self, member: Member) -> None:
        """Kills a node's process, now or, if it is cut off, as soon as it is back."""
        if member.host is not None:
            with contextlib.suppress(Exception):  # it is dead already
                self._ray.kill(member.host)
        member.host = member.call = None

    def stop(self, member: Member) -> None:
        """Asks a node to end."""
        if member.host is not None:
            member.host.stop.remote()


class _Fixed:
    """What Launchpad's addresses resolve to."""

    def __init__(self, address: str) -> None:
        self._address = address

    def build(self) -> str:
        """Returns the address."""
        return self._address


def _in_words(error: Exception) -> str:
    """The first lines of Ray's long messages, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"
