"""The nodes of a run with their processes, as tables show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rlstack.programs.session.metrics.processes import CpuMeter, NodeProcess
from rlstack.programs.tools.status.runs import RunStatus


class NodeRow(NamedTuple):
    """A node at one moment."""

    name: str
    state: str  # up, down, or ? if it may be on another host
    process: NodeProcess | None
    cores: float  # number of cores that the node keeps busy
    restarts: int


class NodeRows:
    """Finds the nodes of runs repeatedly, and measures their processor time between two calls."""

    def __init__(self) -> None:
        """Starts without measurements of processor time."""
        self._cpu = CpuMeter()

    def of(self, status: RunStatus, found: Mapping[str, NodeProcess]) -> list[NodeRow]:
        """Returns the nodes of a run.

        Args:
          status: the status of the run.
          found: the processes of the run, by node.
        """
        program = {name for name in found if name != "train"}
        # The logs of the nodes of several policies do not tell whose nodes they are.
        named = {name.split("/")[0] for name in program - set(status.nodes)}
        logged = {n for n in status.nodes if n in program or n.split("/")[0] not in named}
        names = sorted(logged | program) if program or status.nodes else ["train"]
        rows = []
        for name in names:
            process, restarts = found.get(name), status.restarts.get(name, 0)
            if process is None:
                elsewhere = status.state == "elsewhere" or not found
                rows.append(NodeRow(name, "?" if elsewhere else "down", None, 0.0, restarts))
                continue
            cores = self._cpu.share(f"{status.path}:{name}", process)
            rows.append(NodeRow(name, "up", process, cores, restarts))
        return rows
