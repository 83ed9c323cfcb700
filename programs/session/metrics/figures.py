"""The figures of a run in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rlstack.programs.session.metrics.processes import NodeProcess

Labels = Mapping[str, str]


class Node(NamedTuple):
    """What the coordinator knows of a node."""

    up: bool
    restarts: int
    silence: float  # seconds since its last sign of life
    frames_per_second: float | None = None  # of nodes that make frames
    lag: float | None = None  # updates by which its params are behind


class Figures(NamedTuple):
    """The state of a run at one moment."""

    about: Labels  # what does not change
    budget: int  # frames after which the run ends
    frames: int
    logs: Mapping[str, float]  # the newest value of each name
    logged: float  # Unix time of the newest logs; NaN before the first
    nodes: Mapping[str, Node]
    processes: Mapping[str, NodeProcess]  # of the nodes of this host


# The log that a metric shows: kind, name without its prefix "rlstack_", and what it is. With
# several policies the log has the name of one before it, which becomes a label.
_OF_LOGS = {
    "learner/steps": ("counter", "updates_total", "Updates of the learner."),
    "program/restarts": ("counter", "restarts_total", "Restarts of nodes."),
    "program/lost_frames": ("counter", "lost_frames_total", "Frames lost with nodes."),
    "actor/frames_per_second": ("gauge", "frames_per_second", "Frames per second, lately."),
    "learner/updates_per_second": ("gauge", "updates_per_second", "Updates per second, lately."),
    "actor/episode_return": ("gauge", "episode_return", "Mean return of the newest episodes."),
    "evaluator/episode_return": ("gauge", "evaluation_return", "Mean return, newest evaluation."),
    "params/lag": ("gauge", "params_lag_updates", "Updates by which acting is behind."),
}
_WAIT = "wait_seconds"

_OfNode = tuple[str, str, str, Callable[[Node], float | None]]
_OF_NODES: tuple[_OfNode, ...] = (
    ("gauge", "node_up", "1 if a node reports, 0 if it is silent or has ended.", lambda n: n.up),
    ("counter", "node_restarts_total", "Restarts of a node.", lambda n: n.restarts),
    (
        "gauge",
        "node_heartbeat_age_seconds",
        "Time since a node's last sign of life.",
        lambda n: n.silence,
    ),
    (
        "gauge",
        "node_frames_per_second",
        "Frames per second of a node.",
        lambda n: n.frames_per_second,
    ),
    (
        "gauge",
        "node_params_lag_updates",
        "Updates by which a node's params are behind.",
        lambda n: n.lag,
    ),
)


def as_text(found: Figures) -> str:
    """Returns the figures in the text format."""
    text = _Text()
    text.metric("gauge", "run_info", "What the run is.", [(found.about, 1)])
    text.metric("counter", "frames_total", "Environment steps so far.", [({}, found.frames)])
    text.metric("gauge", "frames_budget", "Steps after which the run ends.", [({}, found.budget)])
    rest = dict(found.logs)
    for log, (kind, name, about) in _OF_LOGS.items():
        text.metric(kind, name, about, _taken(rest, log))
    waits = [({"log": name}, rest.pop(name)) for name in list(rest) if name.endswith(_WAIT)]
    text.metric("counter", "wait_seconds_total", "Time that nodes have waited.", waits)
    for kind, name, about, value in _OF_NODES:
        shown = [({"node": n}, value(node)) for n, node in found.nodes.items()]
        text.metric(kind, name, about, [(labels, v) for labels, v in shown if v is not None])
    here = [({"node": name}, process) for name, process in found.processes.items()]
    text.metric(
        "gauge",
        "node_memory_bytes",
        "Resident memory of a node of this host, with its environments.",
        [(labels, process.memory) for labels, process in here],
    )
    text.metric(
        "counter",
        "node_cpu_seconds_total",
        "Processor time of a node of this host, with its environments.",
        [(labels, process.cpu_seconds) for labels, process in here],
    )
    if not math.isnan(found.logged):
        when = found.logged
        text.metric("gauge", "last_log_timestamp_seconds", "When logs were written.", [({}, when)])
    others = [({"name": name}, value) for name, value in sorted(rest.items())]
    text.metric("gauge", "log", "The newest value of every other log.", others)
    return "".join(text.lines)


def _taken(logs: dict[str, float], log: str) -> list[tuple[Labels, float]]:
    """Returns the values of a log by policy, and removes them from the logs."""
    found: list[tuple[Labels, float]] = []
    for name in list(logs):
        policy, mark, _ = name.rpartition(f"/{log}")
        if name == log:
            found.append(({}, logs.pop(name)))
        elif mark and name.endswith(mark):
            found.append(({"policy": policy}, logs.pop(name)))
    return found


class _Text:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def metric(
        self, kind: str, name: str, about: str, values: Iterable[tuple[Labels, float]]
    ) -> None:
        """Adds a metric with its values; nothing if it has none."""
        name = f"rlstack_{name}"
        samples = [f"{name}{_shown(labels)} {_number(value)}\n" for labels, value in values]
        if samples:
            self.lines += [f"# HELP {name} {about}\n", f"# TYPE {name} {kind}\n", *samples]


def _shown(labels: Labels) -> str:
    parts = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return f"{{{','.join(parts)}}}" if parts else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(int(value)) if value == int(value) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
