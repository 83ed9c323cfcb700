"""Which link or node of a cluster saturates first: `python -m benchmarks.cluster_model [--quick]`.

A distributed program runs on this machine. The kernel reports the processor time of each node and
the bytes sent over each connection (``ss -ti``: the TCP payload in both directions, with gRPC's
overhead). Divided by the frames of the same seconds, these are the costs of a frame. From them the
model computes the limits of a larger cluster: the cores of actors, inference services, replay and
learner, and the network link of every host.

Several learner processes divide the replay, and the links to it. They divide the time of an update
too, unless the network is so small that each makes the whole update. They add the collectives of
the update: `benchmarks.learner_group` counts them and their bytes, with --learners. Each takes the
time of a message, which is taken to grow with the logarithm of the number of processes, and that of
its bytes on the link. The time of a message is that of a sum of 70 kB between two processes with a
core each, as measured on CPUs; --collective-ms gives that of a cluster. Nodes report to the
coordinator five times a second, whatever they do (`benchmarks.coordinator`), those of a host
together. So its core limits their number and not the frames.

The model leaves out latency, the gain of a service from larger batches, and that Python uses one
core at a time. So its figures are upper bounds; they show what to add first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import coordinator, learner_group
from benchmarks.children import cpu_seconds
from benchmarks.topologies import Program
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program.coordinator import TOGETHER
from rlstack.programs.program.params import SENT_BY_ONE
from rlstack.programs.session import timing
from rlstack.rpc import transports

NAME = "cluster_model"
_NEVER = 10**9
_Transport = Literal["auto", "zmq", "courier"]
_WARM_UP = 8.0  # seconds after the first update

# The connections that carry data, as (sender, receiver).
LINKS = (
    ("actor", "inferencer"),
    ("inferencer", "actor"),
    ("actor", "replay"),
    ("replay", "learner"),
    ("learner", "replay"),
)


class Costs(NamedTuple):
    """The costs of one frame, which is one environment step of any actor."""

    cpu: dict[str, float]  # seconds of one core, by group of nodes
    sent: dict[str, float]  # bytes, by "from->to"
    params_bytes: float  # size of one version of the params
    versions: float  # updates per frame
    report: float = 0.0  # seconds of the coordinator's core for a report of a node
    collectives: float = 0.0  # of an update of several learner processes
    exchanged: float = 0.0  # bytes of the arrays in them, twice for sums
    divided: bool = True  # whether these processes divide the time of an update
    transport: str = ""  # that carried the calls
    call: float = 0.0  # seconds of the coordinator's core for a call with the reports of a host
    together: float = 0.0  # the same for each report in it; 0 if each node reports by itself


class Cluster(NamedTuple):
    """A cluster. A learner process and its replay share a host, and have a share of the actors."""

    actors: int
    collective_ms: float = 0.24  # milliseconds of a collective of two learners, without its bytes
    actor_frames: float = 0.0  # frames/s that an environment allows; 0 if only the core limits it
    actors_per_service: int = 10
    actors_per_host: int = 16
    services_per_host: int = 1
    learners: int = 1  # processes, each with the cores or the accelerator of a host
    service_cores: float = 4.0
    replay_cores: float = 8.0
    learner_speedup: float = 1.0  # of an accelerator, relative to the cores measured here
    gbit: float = 10.0  # Gbit/s of a host's link, in each direction
    params_interval: float = 0.02  # seconds between two requests of a host for newer params


def limits(costs: Costs, cluster: Cluster) -> dict[str, float]:
    """Returns the frames/s of all actors at which each node or link is saturated."""
    services = -(-cluster.actors // cluster.actors_per_service)
    service_hosts = _service_hosts(cluster)
    hosts, learners = -(-cluster.actors // cluster.actors_per_host), cluster.learners
    link = cluster.gbit * 1e9 / 8
    up, down = costs.sent["actor->inferencer"], costs.sent["inferencer->actor"]
    insert = costs.sent["actor->replay"]
    # A host fetches every version once, but at most one per params_interval. Each learner process
    # sends them to its share of the hosts, or to some of these, which send them to the others.
    version = costs.params_bytes * costs.versions
    most = costs.params_bytes / cluster.params_interval
    served = min(service_hosts / learners, max(2, SENT_BY_ONE // max(costs.params_bytes, 1)))
    passed_on = service_hosts - served * learners
    found = {
        "actors' cores": cluster.actors / costs.cpu["actor"],
        "services' cores": services * cluster.service_cores / costs.cpu["inferencer"],
        "replay's cores": learners * cluster.replay_cores / costs.cpu["replay"],
        "learner": 1.0 / _learner_seconds(costs, cluster),
        "link actors->": hosts * link / (up + insert),
        "link ->actors": hosts * link / down,
        "link ->services": _with_params(
            service_hosts * link, up, service_hosts * version, service_hosts * most
        ),
        "link services->": _with_params(
            service_hosts * link, down, passed_on * version, passed_on * most
        ),
        "link ->replay": learners * link / insert,
        "link learner->": _with_params(
            link, _exchanged(costs, learners), served * version, served * most
        ),
    }
    if cluster.actor_frames:
        found["environments"] = cluster.actors * cluster.actor_frames
    return found


def _learner_seconds(costs: Costs, cluster: Cluster) -> float:
    """Returns the seconds of each learner process for a frame of all actors."""
    shares = cluster.learners if costs.divided else 1
    alone = costs.cpu["learner"] / cluster.learner_speedup / shares
    messages = costs.collectives * cluster.collective_ms / 1e3 * math.log2(cluster.learners)
    link = cluster.gbit * 1e9 / 8
    return alone + costs.versions * messages + _exchanged(costs, cluster.learners) / link


def _exchanged(costs: Costs, learners: int) -> float:
    """Returns the bytes that each learner process sends to the others, for a frame."""
    return costs.versions * costs.exchanged * (learners - 1) / learners


def coordinator_load(costs: Costs, cluster: Cluster) -> float:
    """Returns the load of the coordinator's core by the reports of all nodes; 1 is full."""
    services = -(-cluster.actors // cluster.actors_per_service)
    nodes = cluster.actors + services + 2 * cluster.learners + 1
    seconds = nodes * costs.report
    if costs.together and cluster.actors >= TOGETHER:
        alone = 2 * cluster.learners + 1
        hosts = -(-cluster.actors // cluster.actors_per_host) + _service_hosts(cluster)
        seconds = alone * costs.report + hosts * costs.call + (nodes - alone) * costs.together
    return seconds / timing.REPORT_PERIOD


def asked_load(costs: Costs, cluster: Cluster) -> float:
    """Returns the share of a learner process's core that hosts take by asking for newer params.

    The answer that there are none is taken to cost what a call of the coordinator costs.
    """
    asking = _service_hosts(cluster) / cluster.learners
    return asking / cluster.params_interval * costs.call


def _service_hosts(cluster: Cluster) -> int:
    services = -(-cluster.actors // cluster.actors_per_service)
    return -(-services // cluster.services_per_host)


def _with_params(link: float, frame: float, version: float, most: float) -> float:
    """Returns the frames/s of a link that carries params as well as frames.

    Args:
      link: bytes per second.
      frame: bytes per frame.
      version: bytes of params per frame, if every version is fetched.
      most: maximum bytes of params per second, if one is fetched in every params_interval.
    """
    every = link / (frame + version)
    if every * version <= most:
        return every
    return (link - most) / frame if frame else float("inf")


def measure(name: str, seconds: float, actors: int, transport: _Transport = "auto") -> Costs:
    """Runs a preset's program on this machine for some seconds; returns the costs of a frame.

    Args:
      name: of the preset.
      seconds: of the measurement.
      actors: number of actors.
      transport: that carries the calls. With zmq the replay is rlstack's own table, so that it
        carries the items too; Reverb has connections of its own.
    """
    chosen = preset(name)
    if transport == "zmq":
        table = dataclasses.replace(chosen.replay, service="table")
        chosen = dataclasses.replace(chosen, replay=table)
    experiment = dataclasses.replace(
        chosen,
        topology="distributed",
        frames=_NEVER,
        checkpoint_period=_NEVER,
        log_period=500,
        program=ProgramConfig(num_actors=actors, transport=transport),
    )
    with tempfile.TemporaryDirectory() as folder:
        program = Program(experiment, Path(folder))
        try:
            program.wait(lambda: program.first(lambda row: row.get("learner/steps", 0) >= 1))
            time.sleep(_WARM_UP)
            before = _Counters(program)
            time.sleep(seconds)
            used = transport if transport != "auto" else transports.default()
            return _between(before, _Counters(program))._replace(transport=used)
        finally:
            program.close()


class _Counters:
    """The frames, processor time and bytes counted so far."""

    def __init__(self, program: Program) -> None:
        rows = [row for row in program.rows() if "learner/steps" in row]
        self.frames, self.updates = rows[-1]["env_frames"], rows[-1]["learner/steps"]
        self.time = rows[-1]["wall_time"]
        self.params_bytes = max(row.get("publisher/bytes", 0.0) for row in rows)
        nodes = program.nodes()
        self.cpu: dict[str, float] = defaultdict(float)
        for name, process in nodes.items():
            self.cpu[name.split("/")[0]] += cpu_seconds(process)
        self.sent = _sent({process.pid: name.split("/")[0] for name, process in nodes.items()})
        self.lag = time.time() - self.time


def _sent(groups: dict[int, str]) -> dict[str, float]:
    """Returns the bytes sent so far between groups of nodes, by "from->to"."""
    command = ["ss", "-tinpH", "state", "established"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ends: dict[tuple[str, str], tuple[str, float]] = {}
    for entry in re.split(r"\n(?=\S)", shown):
        pid = re.search(r"pid=(\d+)", entry)
        if pid is None or int(pid[1]) not in groups:
            continue
        _, _, near, far, *_ = entry.split()
        count = re.search(r"\bbytes_sent:(\d+)", entry)
        ends[near, far] = groups[int(pid[1])], float(count[1]) if count else 0.0
    sent: dict[str, float] = defaultdict(float)
    for (near, far), (group, count_sent) in ends.items():
        if (far, near) in ends:
            sent[f"{group}->{ends[far, near][0]}"] += count_sent
    return sent


def _between(before: _Counters, after: _Counters) -> Costs:
    """Returns the costs per frame between two readings, with frames estimated by their rate."""
    rate = (after.frames - before.frames) / (after.time - before.time)
    seconds = (after.time + after.lag) - (before.time + before.lag)
    frames = max(rate * seconds, 1.0)
    return Costs(
        cpu={name: (after.cpu[name] - before.cpu[name]) / frames for name in sorted(after.cpu)},
        sent={
            f"{near}->{far}": max(0.0, after.sent[f"{near}->{far}"] - before.sent[f"{near}->{far}"])
            / frames
            for near, far in LINKS
        },
        params_bytes=after.params_bytes,
        versions=(after.updates - before.updates) / max(after.frames - before.frames, 1),
    )


def table(costs: Costs, clusters: list[Cluster]) -> str:
    """Returns for each cluster its frames/s, the bottleneck, and the load of all other parts."""
    lines = []
    for cluster in clusters:
        found = limits(costs, cluster)
        first, *rest = sorted(found, key=lambda name: found[name])
        reached = found[first]
        others = ", ".join(f"{name} {reached / found[name]:.0%}" for name in rest[:4])
        learners = f", {cluster.learners} learners" if cluster.learners > 1 else ""
        line = f"{cluster.actors:5} actors{learners}: {reached:12,.0f} frames/s; full: {first}"
        load = coordinator_load(costs, cluster)
        if load > 1:
            line += f"; and the coordinator ({load:.0%}), whose nodes report late"
        lines.append(line)
        asked = asked_load(costs, cluster)
        lines.append(
            f"{'':14}then {others}, coordinator {load:.0%}, learner asked for params {asked:.0%}"
        )
    return "\n".join(lines)


def _key(cluster: Cluster) -> str:
    return f"{cluster.actors}" + (f"/{cluster.learners}" if cluster.learners > 1 else "")


def _finite(found: dict[str, float]) -> dict[str, float]:
    """Leaves out links that never saturate, because JSON has no infinity."""
    return {name: value for name, value in found.items() if value != float("inf")}


def main(arguments: list[str] | None = None) -> None:
    """Measures; prints the costs, a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_model")
    parser.add_argument("--preset", default="cartpole-ppo")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measurement")
    parser.add_argument(
        "--measured-actors", type=int, default=2, help="actors of the measured program"
    )
    parser.add_argument("--quick", action="store_true", help="four seconds")
    parser.add_argument("--costs", help="JSON of an earlier run's costs, instead of a measurement")
    parser.add_argument("--actors", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--learners", type=int, nargs="+", default=[1], help="processes")
    parser.add_argument("--transport", choices=("auto", "zmq", "courier"), default="auto")
    options = {k: v for k, v in Cluster._field_defaults.items() if k != "learners"}
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value)
    args = parser.parse_args(arguments)
    if args.costs:
        costs = Costs(**json.loads(args.costs))
    else:
        print(f"measuring {args.preset} ...", file=sys.stderr, flush=True)
        seconds = 4.0 if args.quick else args.seconds
        costs = measure(args.preset, seconds, args.measured_actors, args.transport)
        if max(args.learners) > 1:
            pair = learner_group.measure(args.preset, 2, seconds / 2)
            costs = costs._replace(
                collectives=pair.collectives,
                exchanged=pair.exchanged,
                divided=bool(pair.divided),
            )
        costs = costs._replace(**coordinator.measure(args.transport)._asdict())
    for group, cpu in costs.cpu.items():
        print(f"{group:24} {1e6 * cpu:10.1f} us of a core a frame")
    for link, count in costs.sent.items():
        print(f"{link:24} {count:10.1f} bytes a frame")
    print(f"{'params':24} {costs.params_bytes:10,.0f} bytes, {costs.versions:.5f} updates a frame")
    print(f"{'report':24} {1e6 * costs.report:10.1f} us of the coordinator's core")
    print(
        f"{'reports of a host':24} {1e6 * costs.call:10.1f} us, and {1e6 * costs.together:.1f} each"
    )
    print(
        f"{'several learners':24} {costs.collectives:10.0f} collectives an update, "
        f"{costs.exchanged:,.0f} bytes; {'divided' if costs.divided else 'whole'} updates"
    )
    chosen: dict[str, Any] = {name: getattr(args, name) for name in options}
    clusters = [
        Cluster(actors, learners=learners, **chosen)
        for actors in args.actors
        for learners in args.learners
        if learners <= actors
    ]
    print(table(costs, clusters))
    found = {_key(cluster): _finite(limits(costs, cluster)) for cluster in clusters}
    print(json.dumps({"name": NAME, "costs": costs._asdict(), "limits": found}))


if __name__ == "__main__":
    main()
