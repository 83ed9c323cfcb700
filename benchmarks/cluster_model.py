"""Which link or node of a cluster saturates first: `python -m benchmarks.cluster_model [--quick]`.

A distributed program runs on this machine. The kernel reports the processor time of each node and
the bytes sent over each connection (``ss -ti``: the TCP payload in both directions, with gRPC's
overhead). Divided by the frames of the same seconds, these are the costs of a frame. From them the
model computes the limits of a larger cluster: the cores of actors, inference services, replay and
learner, and the network link of every host.

The model leaves out latency, the gain of a service from larger batches, and that Python uses one
core at a time. So its figures are upper bounds; they show what to add first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.topologies import Program
from programs.experiment import ProgramConfig
from programs.presets import preset

NAME = "cluster_model"
_NEVER = 10**9
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


class Cluster(NamedTuple):
    """A cluster. Learner and replay share a host; each service has its own."""

    actors: int
    actor_frames: float = 0.0  # frames/s that an environment allows; 0 if only the core limits it
    actors_per_service: int = 10
    actors_per_host: int = 16
    service_cores: float = 4.0
    replay_cores: float = 8.0
    learner_speedup: float = 1.0  # of an accelerator, relative to the cores measured here
    gbit: float = 10.0  # Gbit/s of a host's link, in each direction
    params_interval: float = 0.02  # seconds between two requests of a service for newer params


def limits(costs: Costs, cluster: Cluster) -> dict[str, float]:
    """Returns the frames/s of all actors at which each node or link is saturated."""
    services = -(-cluster.actors // cluster.actors_per_service)
    hosts = -(-cluster.actors // cluster.actors_per_host)
    link = cluster.gbit * 1e9 / 8
    up, down = costs.sent["actor->inferencer"], costs.sent["inferencer->actor"]
    insert = costs.sent["actor->replay"]
    # Services fetch every version, but at most one per params_interval.
    version = costs.params_bytes * costs.versions
    most = costs.params_bytes / cluster.params_interval
    found = {
        "actors' cores": cluster.actors / costs.cpu["actor"],
        "services' cores": services * cluster.service_cores / costs.cpu["inferencer"],
        "replay's cores": cluster.replay_cores / costs.cpu["replay"],
        "learner": cluster.learner_speedup / costs.cpu["learner"],
        "link actors->": hosts * link / (up + insert),
        "link ->actors": hosts * link / down,
        "link ->services": _with_params(services * link, up, services * version, services * most),
        "link services->": services * link / down,
        "link ->replay": link / insert,
        "link learner->": _with_params(link, 0.0, services * version, services * most),
    }
    if cluster.actor_frames:
        found["environments"] = cluster.actors * cluster.actor_frames
    return found


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


def measure(name: str, seconds: float, actors: int) -> Costs:
    """Runs a preset's program on this machine for some seconds; returns the costs of a frame."""
    chosen = preset(name)
    experiment = dataclasses.replace(
        chosen,
        topology="distributed",
        frames=_NEVER,
        checkpoint_period=_NEVER,
        log_period=500,
        program=ProgramConfig(num_actors=actors),
    )
    with tempfile.TemporaryDirectory() as folder:
        program = Program(experiment, Path(folder))
        try:
            program.wait(lambda: program.first(lambda row: row.get("learner/steps", 0) >= 1))
            time.sleep(_WARM_UP)
            before = _Counters(program)
            time.sleep(seconds)
            return _between(before, _Counters(program))
        finally:
            program.close()


class _Counters:
    """The frames, processor time and bytes counted so far."""

    def __init__(self, program: Program) -> None:
        rows = [row for row in program.rows() if "learner/steps" in row]
        self.frames, self.updates = rows[-1]["env_frames"], rows[-1]["learner/steps"]
        self.time = rows[-1]["wall_time"]
        self.params_bytes = max(row.get("publisher/bytes", 0.0) for row in rows)
        nodes = _nodes(program.pid)
        self.cpu: dict[str, float] = defaultdict(float)
        for name, process in nodes.items():
            times = process.cpu_times()
            self.cpu[name.split("/")[0]] += times.user + times.system
        self.sent = _sent({process.pid: name.split("/")[0] for name, process in nodes.items()})
        self.lag = time.time() - self.time


def _nodes(root: int) -> dict[str, psutil.Process]:
    """Returns the nodes' processes below ``root`` by name, from their titles."""
    found = {}
    for process in psutil.Process(root).children(recursive=True):
        title = re.match(r"rlstack: ([\w/]+) ", " ".join(process.cmdline()))
        if title is not None and title[1] != "launcher":
            found[title[1]] = process
    return found


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
        lines.append(f"{cluster.actors:5} actors: {reached:12,.0f} frames/s; full: {first}")
        lines.append(f"{'':14}then {others}")
    return "\n".join(lines)


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
    parser.add_argument("--actors", type=int, nargs="+", default=[10, 100, 1000])
    for name, value in Cluster._field_defaults.items():
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value)
    args = parser.parse_args(arguments)
    if args.costs:
        costs = Costs(**json.loads(args.costs))
    else:
        print(f"measuring {args.preset} ...", file=sys.stderr, flush=True)
        seconds = 4.0 if args.quick else args.seconds
        costs = measure(args.preset, seconds, args.measured_actors)
    for group, cpu in costs.cpu.items():
        print(f"{group:24} {1e6 * cpu:10.1f} us of a core a frame")
    for link, count in costs.sent.items():
        print(f"{link:24} {count:10.1f} bytes a frame")
    print(f"{'params':24} {costs.params_bytes:10,.0f} bytes, {costs.versions:.5f} updates a frame")
    chosen: dict[str, Any] = {name: getattr(args, name) for name in Cluster._field_defaults}
    clusters = [Cluster(actors, **chosen) for actors in args.actors]
    print(table(costs, clusters))
    found = {str(cluster.actors): _finite(limits(costs, cluster)) for cluster in clusters}
    print(json.dumps({"name": NAME, "costs": costs._asdict(), "limits": found}))


if __name__ == "__main__":
    main()
