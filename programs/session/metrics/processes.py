"""The processes of runs on this machine, found by their titles."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# "rlstack: actor/0:env/3 RUN_DIR"; environments belong to their node.
_TITLE = re.compile(r"rlstack: ([\w/]+)(:\S+)? (/.+)")
_HELPERS = ("supervisor", "launcher")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class NodeProcess(NamedTuple):
    """The process of a node, with those of its environments."""

    pid: int
    cpu_seconds: float  # since its start
    age: float  # seconds since its start
    memory: int  # resident bytes


def find(proc: Path = Path("/proc")) -> Mapping[str, Mapping[str, NodeProcess]]:
    """Returns the nodes with a process: run directory -> node -> its process.

    A run in one process has the node "train". Where there is no /proc, nothing is found.
    """
    found: dict[str, dict[str, NodeProcess]] = {}
    try:
        entries = [entry for entry in os.listdir(proc) if entry.isdecimal()]
        uptime = float((proc / "uptime").read_text().split()[0])
    except OSError:
        return {}
    for pid in entries:
        try:
            title = (proc / pid / "cmdline").read_bytes().rstrip(b"\0 ").decode(errors="replace")
            matched = _TITLE.fullmatch(title)
            if matched is None or matched[1] in _HELPERS:
                continue
            fields = (proc / pid / "stat").read_text().rpartition(")")[2].split()
            pages = int((proc / pid / "statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS
        one = NodeProcess(int(pid), seconds, uptime - int(fields[19]) / _TICKS, pages * _PAGE)
        nodes = found.setdefault(matched[3], {})
        nodes[matched[1]] = _joined(nodes.get(matched[1]), one, is_node=matched[2] is None)
    return found


def _joined(other: NodeProcess | None, one: NodeProcess, *, is_node: bool) -> NodeProcess:
    if other is None:
        return one
    node = one if is_node else other
    return node._replace(
        cpu_seconds=other.cpu_seconds + one.cpu_seconds,
        age=max(other.age, one.age),
        memory=other.memory + one.memory,
    )


class CpuMeter:
    """Measures the processor time that nodes use between two calls."""

    def __init__(self) -> None:
        """Starts without measurements."""
        self._last: dict[tuple[str, int], tuple[float, float]] = {}

    def share(self, node: str, process: NodeProcess, now: float | None = None) -> float:
        """Returns the mean number of busy cores since the last call, or since the node's start."""
        now = time.monotonic() if now is None else now
        key = (node, process.pid)
        then, before = self._last.get(key, (now - process.age, 0.0))
        self._last[key] = (now, process.cpu_seconds)
        return max(0.0, process.cpu_seconds - before) / max(now - then, 1e-3)
