"""Programs on a Ray cluster and with several learner processes: config and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from rlstack.checks import Checked

if TYPE_CHECKING:
    from programs.experiment import Experiment

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


def check(experiment: Experiment) -> None:
    """Checks what a Ray cluster and several learner processes need.

    Raises:
      ValueError: something is missing; the message says what to change.
    """
    if experiment.program.launch == "ray" and experiment.topology != "distributed":
        raise ValueError(
            "Experiment: topology must be distributed with launch ray, because the nodes of other "
            f"topologies share memory; got {experiment.topology}. Add --topology distributed."
        )
    count = experiment.learner.processes
    if count == 1:
        return
    for field, came, rule, advice in _limits(experiment, count):
        raise ValueError(
            f"Experiment: {field} must be {rule} with learner.processes {count}; got {came}. "
            f"{advice}"
        )


def _limits(experiment: Experiment, count: int) -> Iterator[tuple[str, Any, str, str]]:
    """Yields fields that do not fit several learner processes, with value, rule and advice."""
    program, replay, learner = experiment.program, experiment.replay, experiment.learner
    one = "Or use --learner.processes 1."
    if experiment.in_one_process:
        rule = "heavy_env, light_env or distributed"
        yield "topology", experiment.topology, rule, "--learner.devices needs no processes."
    if experiment.policies:
        yield "policies", ", ".join(experiment.policies), "empty", one
    if program.launch not in ("processes", "ray"):
        yield "program.launch", program.launch, "processes or ray", one
    if program.pacing != "asynchronous":
        yield "program.pacing", program.pacing, "asynchronous", one
    if replay.min_actors:
        yield "replay.min_actors", replay.min_actors, "0", one
    if experiment.topology == "distributed" and replay.chosen_service != "table":
        yield "replay.service", replay.chosen_service, "table", "Add --replay.service table."
    if learner.prefetch == "on":
        yield "learner.prefetch", learner.prefetch, "auto or off", one
    if learner.minibatches == "calls":
        yield "learner.minibatches", learner.minibatches, "auto or scan", one
    devices = len(learner.devices)
    if program.launch == "processes" and devices % count:
        yield "learner.devices", devices, f"a multiple of {count} devices", one
    for field, divided in (
        ("program.num_actors", program.num_actors),
        ("replay.batch_size", replay.batch_size),
    ):
        if divided % count:
            yield field, divided, f"a multiple of {count}", "Change one of them."
