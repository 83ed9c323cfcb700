"""How a Ray cluster carries a program: the part of the config that only ``launch: ray`` reads."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlstack.checks import Checked

GROUPS = ("coordinator", "replay", "learner", "inferencer", "actor", "evaluator")
_WITH_LEARNER = ("replay", "coordinator")
_CPUS = {"coordinator": 0.1, "evaluator": 0.5}  # others take a core a node


@dataclasses.dataclass(frozen=True)
class RayConfig(Checked):
    """Where Ray runs, what it reserves for each node, and what happens when nodes are lost.

    Groups of nodes are actor, inferencer, learner, replay, evaluator and coordinator.
    """

    address: str = ""
    """host:port of the cluster's head, or auto for the cluster that this machine is part of; empty
    for $RAY_ADDRESS and, without that, a Ray of its own for the time of the run."""
    cpus: dict[str, float] = dataclasses.field(default_factory=dict)
    """Cores reserved for a node, by group; else 1, but 0.1 for the coordinator and 0.5 for the
    evaluator."""
    gpus: dict[str, float] = dataclasses.field(default_factory=dict)
    """GPUs reserved for a node, by group; a group without runs JAX on the CPU."""
    memory_gb: dict[str, float] = dataclasses.field(default_factory=dict)
    """Memory reserved for a node, by group; it is no limit, only a place kept free."""
    together: dict[str, str] = dataclasses.field(default_factory=dict)
    """Groups whose nodes go to the hosts of another group's, number by number, such as actor
    inferencer. Replay and coordinator go with the learner, so that one host holds all that must
    not be lost, unless it says replay any; all others are spread."""
    env_vars: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of every node."""
    ship_code: bool = False
    """Sends rlstack, agents and programs to every host, instead of finding them installed there at
    the same path as here."""
    on_loss: Literal["end", "resume"] = "end"
    """When learner, replay or coordinator are lost: end, or start anew from the last checkpoint."""
    lost_seconds: float = 30.0
    """Seconds of silence after which a host's nodes are given up and placed elsewhere."""
    place_seconds: float = 120.0
    """Seconds in which Ray must have found a place for a node."""

    def __post_init__(self) -> None:
        for field in ("cpus", "gpus", "memory_gb"):
            amounts = getattr(self, field)
            holds = set(amounts) <= set(GROUPS) and all(amount >= 0 for amount in amounts.values())
            self.require(field, holds, f"amounts of at least 0 by group ({', '.join(GROUPS)})")
        follows = {group: self.beside(group) for group in (*GROUPS, *self.together)}
        leaders = {leader for leader in follows.values() if leader}
        self.require(
            "together",
            {*follows, *leaders} <= set(GROUPS) and not any(follows[leader] for leader in leaders),
            f"groups ({', '.join(GROUPS)}) and those they follow, which follow none themselves",
        )
        self.require("lost_seconds", self.lost_seconds > 0, "positive")
        self.require("place_seconds", self.place_seconds > 0, "positive")

    def cpus_of(self, group: str) -> float:
        """Cores reserved for a node of the group."""
        return self.cpus.get(group, _CPUS.get(group, 1.0))

    def beside(self, group: str) -> str:
        """The group to whose hosts this one goes, nothing if to any."""
        leader = self.together.get(group, "learner" if group in _WITH_LEARNER else "any")
        return "" if leader == "any" else leader
