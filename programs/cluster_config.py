"""The config of a Ray cluster, which only ``launch: ray`` reads."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlstack.checks import Checked

GROUPS = ("coordinator", "replay", "learner", "inferencer", "actor", "evaluator")
_WITH_LEARNER = ("replay", "coordinator")
_CPUS = {"coordinator": 0.1, "evaluator": 0.5}  # 1 for all other groups


@dataclasses.dataclass(frozen=True)
class RayConfig(Checked):
    """The Ray cluster, the resources of each node, and the reaction to lost nodes.

    Groups of nodes are actor, inferencer, learner, replay, evaluator and coordinator.
    """

    address: str = ""
    """host:port of the head of the cluster, or auto for the cluster that this machine belongs to.
    By default $RAY_ADDRESS; if that is not set, a local Ray that ends with the run."""
    cpus: dict[str, float] = dataclasses.field(default_factory=dict)
    """Cores reserved for each node, by group.
    The default is 0.1 for the coordinator, 0.5 for the evaluator and 1 for all other groups."""
    gpus: dict[str, float] = dataclasses.field(default_factory=dict)
    """GPUs reserved for each node, by group. Nodes of groups that are not listed use the CPU."""
    memory_gb: dict[str, float] = dataclasses.field(default_factory=dict)
    """Memory in GB reserved for each node, by group. Ray does not enforce it as a limit."""
    together: dict[str, str] = dataclasses.field(default_factory=dict)
    """Pairs of groups: node i of the first goes to the host of node i of the second.
    For instance, actor inferencer. By default replay and coordinator go with the learner,
    so that one host has all state; replay any lets replay go anywhere. Other groups are spread."""
    env_vars: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every node, as names and values."""
    ship_code: bool = False
    """Whether to send rlstack, agents and programs to every host.
    Otherwise they must be installed there, at the same path as here."""
    on_loss: Literal["end", "resume"] = "end"
    """What to do when the learner, replay or coordinator is lost.
    end: the run fails. resume: it restarts from the last checkpoint."""
    lost_seconds: float = 30.0
    """Seconds without contact after which the nodes of a host are moved to other hosts."""
    place_seconds: float = 120.0
    """Seconds that Ray may take to find a host for a node before the run fails."""

    def __post_init__(self) -> None:
        for field in ("cpus", "gpus", "memory_gb"):
            amounts = getattr(self, field)
            holds = set(amounts) <= set(GROUPS) and all(amount >= 0 for amount in amounts.values())
            self.require(field, holds, f"amounts of at least 0 by group ({', '.join(GROUPS)})")
        follows = {group: self.host_group(group) for group in (*GROUPS, *self.together)}
        leaders = {leader for leader in follows.values() if leader}
        self.require(
            "together",
            {*follows, *leaders} <= set(GROUPS) and not any(follows[leader] for leader in leaders),
            f"groups ({', '.join(GROUPS)}) and those they follow, which follow none themselves",
        )
        self.require("lost_seconds", self.lost_seconds > 0, "positive")
        self.require("place_seconds", self.place_seconds > 0, "positive")

    def cpus_of(self, group: str) -> float:
        """Returns the cores reserved for a node of the group."""
        return self.cpus.get(group, _CPUS.get(group, 1.0))

    def host_group(self, group: str) -> str:
        """Returns the group whose hosts this group shares; "" if it may go to any host."""
        leader = self.together.get(group, "learner" if group in _WITH_LEARNER else "any")
        return "" if leader == "any" else leader
