"""The nodes of a program, and what each topology and launcher needs: config and checks."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rlstack.checks import Checked
from rlstack.configs.learner import LearnerConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.programs.config.layouts import LAYOUTS, Topology

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
    """Whether to send the code to every host. Otherwise it must be there, at the same path."""
    lost_seconds: float = 30.0
    """Seconds without contact after which the nodes of a host are moved to other hosts."""
    place_seconds: float = 120.0
    """Seconds that Ray may take to find a host for a node; then the run fails, or actors wait."""

    def __post_init__(self) -> None:
        super().__post_init__()
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


@dataclasses.dataclass(frozen=True)
class ProgramConfig(Checked):
    """The nodes of a topology of several processes, and how actors and learner keep pace."""

    num_actors: int = 2
    """Number of actors, each with env.num_envs environments."""
    num_inferencers: int = 1
    """Number of inference services, among which actors are divided (light_env, distributed)."""
    trainers: Literal["one_each", "one"] = "one_each"
    """Nodes that learn, with several policies. one_each: one node for each. one: one for all."""
    on_learner_loss: Literal["end", "restart"] = "end"
    """What to do when the learner of one of several policies is lost. end: as on_loss says.
    restart: that learner continues from the last checkpoint, and the other policies go on; needs
    pacing asynchronous, and no rounds."""
    on_loss: Literal["end", "resume"] = "end"
    """What to do when the learner, one of several learner processes, the replay or the coordinator
    is lost, as when its process is killed. end: the run fails, and --resume continues it. resume:
    all nodes start again from the last checkpoint, at most max_restarts times in a row (launch
    processes, launchpad and ray). An exception ends the run in any case."""
    launch: Literal["processes", "threads", "launchpad", "ray", "hosts"] = "processes"
    """What runs the nodes. processes: one process each, on this machine. launchpad: the same, as
    nodes of a Launchpad program (CPython 3.10 only). threads: all nodes in this process, so that a
    debugger can stop in any of them. For the topology distributed only: ray, the hosts of a Ray
    cluster, and hosts, several hosts on each of which this same command runs."""
    transport: Literal["auto", "direct", "zmq", "courier"] = "auto"
    """What carries calls between nodes. direct: nothing, for launch threads only; arrays are not
    copied. zmq: ZeroMQ, encrypted, for the nodes of this run only. courier: Launchpad's; neither.
    auto: direct with threads; else courier where it is installed, and zmq elsewhere."""
    acting: Literal["auto", "own", "shared"] = "auto"
    """Who acts in heavy_env with launch threads. own: each actor. shared: a thread for each of
    inferencer.devices, for all that wait. auto: shared for more than two on an accelerator."""
    pacing: Literal["asynchronous", "lock_step"] = "asynchronous"
    """asynchronous: actors act while the learner learns.
    lock_step: actors wait for it, as in a single process, so that a run can be repeated exactly."""
    params_interval: float = 0.02
    """Seconds between two requests for newer params, where they are fetched in the background."""
    max_restarts: int = 10
    """How often in a row one actor or inference service, or with on_learner_loss restart a learner,
    may restart before the program fails."""
    silence_seconds: float = 60.0
    """Seconds without a sign of life after which a node's process is killed (launch processes).
    Actors, inference services and the evaluator are then restarted, and a learner with
    on_learner_loss restart; other nodes end the program. A thread gives the signs, so a long
    computation is no silence unless it holds Python's lock. 0 for no limit, as in a debugger."""
    interface: str = ""
    """Network interface (such as eth0) or address at which servers listen; 0.0.0.0 or :: is all.
    By default loopback, or on several hosts the address by which the others know the host."""
    ports: str = ""
    """Ports for the servers of all nodes, such as 20000-20100, for rules of networks.
    By default free ones, and with launch hosts 20000-20999."""
    metrics: str = ""
    """PORT or ADDRESS:PORT at which Prometheus gets the figures of rlstack top, over HTTP.
    A port without an address listens on loopback. Whoever reaches another can read them."""
    hosts: tuple[str, ...] = ()
    """The hosts of launch hosts: names or addresses, also as in Slurm (node[01-04]). The first ones
    have a learner process each. By default those of Slurm or SkyPilot."""
    host: int | None = None
    """Which of the hosts this one is, from 0. By default as Slurm or SkyPilot says, or by name."""
    ray: RayConfig = RayConfig()
    """The Ray cluster, for launch ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "num_actors", "num_inferencers")
        self.require_at_least(0, "max_restarts")
        rule = f"at most num_actors ({self.num_actors}); otherwise some have no actor to serve"
        self.require("num_inferencers", self.num_inferencers <= self.num_actors, rule)
        rule = "zmq or courier, because nodes in several processes cannot call one another directly"
        self.require("transport", self.transport != "direct" or self.launch == "threads", rule)
        self.require("params_interval", self.params_interval > 0, "positive")
        enough = self.silence_seconds == 0 or 5 <= self.silence_seconds < math.inf
        self.require("silence_seconds", enough, "0, or at least 5")
        fits = re.fullmatch(r"[1-9]\d*-\d+", self.ports) is not None
        fits = fits and 0 < max(self.port_range, default=0) < 1 << 16
        self.require("ports", fits or not self.ports, "FIRST-LAST, such as 20000-20100")
        rule = "end with launch threads, which are lost together, and hosts, which start anew"
        survives = self.launch not in ("threads", "hosts")
        self.require("on_loss", self.on_loss == "end" or survives, rule)
        port = self.metrics.rpartition(":")[2]
        fits = not self.metrics or (port.isdecimal() and int(port) < 1 << 16)
        self.require("metrics", fits, "PORT or ADDRESS:PORT, such as 9100 or [::]:9100")

    @property
    def port_range(self) -> range:
        """The ports for servers; empty for free ones."""
        ports = self.ports or ("20000-20999" if self.launch == "hosts" else "1-0")
        first, _, last = ports.partition("-")
        return range(int(first), int(last) + 1)

    @property
    def on_several_hosts(self) -> bool:
        """Whether nodes run on hosts that share nothing but the run directory."""
        return self.launch in ("ray", "hosts")


def check(
    topology: Topology,
    program: ProgramConfig,
    replay: ReplayConfig,
    learner: LearnerConfig,
    policies: Sequence[str],
) -> None:
    """Checks what several hosts and several learner processes need.

    Args:
      topology: the topology of the experiment.
      program: the experiment's nodes.
      replay: the experiment's replay.
      learner: the experiment's learner.
      policies: the names of several policies.

    Raises:
      ValueError: something is missing; the message says what to change.
    """
    if program.on_several_hosts and not LAYOUTS[topology].has_replay_node:
        raise ValueError(
            f"Experiment: topology must be distributed with launch {program.launch}, because the "
            f"nodes of other topologies share memory; got {topology}. Add --topology distributed."
        )
    if program.ports and LAYOUTS[topology].has_replay_node and replay.chosen_service == "reverb":
        raise ValueError(
            "Experiment: program.ports must be empty with replay.service reverb, which also takes "
            f"a free port; got {program.ports}. Add --replay.service table."
        )
    if learner.processes == 1:
        return
    for field, came, rule, advice in _limits(topology, program, replay, learner, policies):
        raise ValueError(
            f"Experiment: {field} must be {rule} with learner.processes {learner.processes}; got "
            f"{came}. {advice}"
        )


def _limits(
    topology: Topology,
    program: ProgramConfig,
    replay: ReplayConfig,
    learner: LearnerConfig,
    policies: Sequence[str],
) -> Iterator[tuple[str, Any, str, str]]:
    """Yields fields that do not fit several learner processes, with value, rule and advice."""
    count, one = learner.processes, "Or use --learner.processes 1."
    if not LAYOUTS[topology].has_nodes:
        rule = "heavy_env, light_env or distributed"
        yield "topology", topology, rule, "--learner.devices needs no processes."
    if policies:
        yield "policies", ", ".join(policies), "empty", one
    if program.launch not in ("processes", "ray", "hosts"):
        yield "program.launch", program.launch, "processes, ray or hosts", one
    if program.pacing != "asynchronous":
        yield "program.pacing", program.pacing, "asynchronous", one
    if replay.min_actors:
        yield "replay.min_actors", replay.min_actors, "0", one
    if LAYOUTS[topology].has_replay_node and replay.chosen_service != "table":
        yield "replay.service", replay.chosen_service, "table", "Add --replay.service table."
    if learner.prefetch == "on":
        yield "learner.prefetch", learner.prefetch, "auto or off", one
    devices = len(learner.devices)
    if program.launch == "processes" and devices % count:
        yield "learner.devices", devices, f"a multiple of {count} devices", one
    for field, divided in (
        ("program.num_actors", program.num_actors),
        ("replay.batch_size", replay.batch_size),
    ):
        if divided % count:
            yield field, divided, f"a multiple of {count}", "Change one of them."
