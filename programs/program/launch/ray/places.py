"""The hosts of a Ray cluster as places for nodes: which to take, and which to leave."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.program.launch.ray import cluster
from rlstack.programs.session import timing

if TYPE_CHECKING:
    from rlstack.programs.program.launch.ray.nodes import RayNode

_WRITERS = ("learner", "replay", "coordinator", "evaluator")  # groups that write to the directory


class Places:
    """Chooses a host for each node, and notices hosts that join the cluster or will leave it.

    A thread asks the head of the cluster, because calls wait for a head that is gone.

    Attributes:
      here: Ray's id of the launcher's host.
    """

    def __init__(self, ray: Any, cfg: RayConfig, *, stored: bool) -> None:
        """Takes the hosts of now for those with which the program starts.

        Args:
          ray: the package, connected to the cluster.
          cfg: the resources of each node.
          stored: whether the run directory is in an object store, of which the launcher's host has
            the copy to which nodes write.
        """
        self._ray, self._cfg, self._stored = ray, cfg, stored
        self.here = str(ray.get_runtime_context().get_node_id())
        self._avoided: dict[str, float] = {}  # host -> time until which it is avoided
        self._joined: set[str] = set()  # hosts to which actors may still move
        self._changed = threading.Condition()
        self._asked = self._closed = False
        self._ask()
        self._known, self._looked = set(self._hosts), self._answered
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        """Asks the head for the hosts."""
        began = time.monotonic()
        hosts = {str(host["NodeID"]): host for host in self._ray.nodes() if host["Alive"]}
        # Ray has no other way to ask; its own library Serve asks so too.
        leaving = set(self._ray._private.state.state.get_draining_nodes())
        with self._changed:
            self._hosts, self._leaving, self._answered = hosts, leaving, began
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed, timing.RAY_HOSTS)
                if self._closed:
                    return
                self._asked = False
            with contextlib.suppress(Exception):  # the head is gone, or this process leaves
                self._ask()

    def close(self) -> None:
        """Asks no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timing.RAY_HOSTS)

    @property
    def silence(self) -> float:
        """Seconds for which the head of the cluster has not answered."""
        return max(0.0, time.monotonic() - self._answered - timing.RAY_HOSTS)

    def is_here(self, node: RayNode) -> bool:
        """Whether a node writes to the copy of a run directory in an object store."""
        return self._stored and node.group in _WRITERS

    def first(self, node: RayNode, nodes: Sequence[RayNode]) -> tuple[str, Any]:
        """Returns the host for a node at the start, "" for any, and Ray's strategy."""
        leader = self._leader(node, nodes)
        host = self.here if self.is_here(node) else ""
        if not host and leader is not None and leader.placement is not None:
            host = leader.placement.node_id
        return host, cluster.on_host(self._ray, host, soft=False) if host else "SPREAD"

    def _leader(self, node: RayNode, nodes: Sequence[RayNode]) -> RayNode | None:
        group = self._cfg.host_group(node.group)
        leaders = [other for other in nodes if other.group == group]
        return leaders[node.index % len(leaders)] if leaders else None

    def next(self, node: RayNode, nodes: Sequence[RayNode]) -> tuple[str, Any]:
        """Returns the host, with the fewest nodes of the program, for one that was lost."""
        if self.is_here(node):
            return self.here, cluster.on_host(self._ray, self.here, soft=False)
        now = time.monotonic()
        fit = [host for host in self.fitting(node) if self._avoided.get(host, 0.0) < now]
        if not fit:
            return "", "SPREAD"
        there = collections.Counter(other.host for other in nodes if other is not node)
        host = min(fit, key=lambda host: there[host])
        return host, cluster.on_host(self._ray, host, soft=True)

    def fitting(self, node: RayNode) -> list[str]:
        """Returns the hosts that stay and whose total resources are enough for a node."""
        reserved = cluster.reserved(self._cfg, node.group)
        kinds = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        return [
            name
            for name, host in self._hosts.items()
            if name not in self._leaving
            and all(host["Resources"].get(kind, 0) >= reserved[o] for kind, o in kinds.items())
        ]

    def avoid(self, node: RayNode) -> None:
        """Places no lost node on this node's host for a while."""
        if node.placement is not None:
            until = time.monotonic() + timing.RAY_AVOID_HOST
            self._avoided[node.placement.node_id] = until

    def is_gone(self, node: RayNode) -> bool:
        """Whether the host of a node has left the cluster."""
        if node.placement is None:
            return False
        now = time.monotonic()
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered > now, timing.RAY_HOSTS)
        return node.placement.node_id not in self._hosts

    def look(self) -> bool:
        """Notices changes of the cluster; returns whether the head has answered again."""
        if self._answered == self._looked:
            return False
        self._looked, alive = self._answered, set(self._hosts)
        self._joined = ((self._joined | alive - self._known) & alive) - self._leaving
        self._known |= alive
        return True

    def is_leaving(self, host: str) -> bool:
        """Whether a host will leave the cluster, by a notice (`ray drain-node`)."""
        return host in self._leaving

    def to_move(self, nodes: Sequence[RayNode]) -> RayNode | None:
        """Returns an actor that should move to a host that has joined; None if none should.

        The hosts with most actors give some, until each has at most one more than the new one.
        """
        actors = [node for node in nodes if node.group == "actor" and node.host]
        # A host group keeps actors on the hosts of the group's other nodes.
        if not actors or self._cfg.host_group("actor"):
            return None
        there = collections.Counter(node.host for node in actors)
        fullest, most = there.most_common(1)[0]
        fit = self._joined & set(self.fitting(actors[0]))
        self._joined = {host for host in fit if there[host] + 2 <= most}
        if not self._joined:
            return None
        return [node for node in actors if node.host == fullest][-1]

    def refused(self) -> None:
        """Moves no more actors to the hosts that have joined so far: they have no room."""
        self._joined.clear()
