"""The coordinator's cost of a report: `python -m benchmarks.coordinator [--transport zmq]`.

A coordinator runs in a process of its own, without a program. This process sends it the reports of
many nodes, one after another, as actors send them: each by itself, and those of a host together.
The kernel reports the processor time that the
coordinator takes. It has no logs to write, so the figure is that of the reports only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.children import cpu_seconds
from rlstack.programs.config.presets import preset
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.host import Report
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import RemoteObject, codec, serve, transports
from rlstack.storage.loggers import Fanout

NAME = "coordinator"
_NODES, _TOGETHER = 1000, 16
_LOGS = {"actor/episode_return": np.ones(2), "actor/episode_length": np.ones(2)}


class Costs(NamedTuple):
    """Seconds of the coordinator's core."""

    report: float  # for a report that a node makes by itself
    call: float  # for a call with the reports of a host, without these
    together: float  # for each report in it


def measure(transport: str = "auto", reports: int = 3000) -> Costs:
    """Measures a coordinator.

    Args:
      transport: that carries the reports: zmq, courier, or auto for the default here.
      reports: number of calls with one report; with several reports there are a quarter as many.
    """
    used = transport if transport != "auto" else transports.default()
    command = [sys.executable, "-m", "benchmarks.coordinator", "--serve"]
    with transports.chosen(used), tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, **transports.variables(), "JAX_PLATFORMS": "cpu"}
        child = subprocess.Popen(
            [*command, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        try:
            assert child.stdout is not None
            client = RemoteObject(child.stdout.readline().strip(), Coordinator, name=NAME)
            process = psutil.Process(child.pid)
            calls = _Calls(client)
            for size in (0, 1, _TOGETHER):
                calls.make(size, _NODES // max(1, size))
            alone = _used(process, lambda: calls.make(0, reports)) / reports
            one = _used(process, lambda: calls.make(1, reports)) / reports
            several = _used(process, lambda: calls.make(_TOGETHER, reports // 4)) / (reports // 4)
            client.close()
            each = (several - one) / (_TOGETHER - 1)
            return Costs(alone, one - each, each)
        finally:
            child.kill()
            child.communicate()


def _used(process: psutil.Process, work: Callable[[], None]) -> float:
    before = cpu_seconds(process)
    work()
    return cpu_seconds(process) - before


class _Calls:
    def __init__(self, client: RemoteObject) -> None:
        self._client, self._number = client, 0

    def make(self, size: int, count: int) -> None:
        """Makes calls with this many reports each; 0 for reports that nodes make themselves."""
        for _ in range(count):
            made = [self._report() for _ in range(max(1, size))]
            if size:
                self._client.report_all([codec.encode(tuple(report)) for report in made])
            else:
                self._client.report(*made[0])

    def _report(self) -> Report:
        node, batch = f"actor/{self._number % _NODES}", self._number // _NODES + 1
        self._number += 1
        counts, gauges = {"env_frames": 0.0}, {"params/version": 1.0}
        return Report(node, 0, 1, counts, gauges, _LOGS, batch, batch)


def _serve(folder: str) -> None:
    coordinator = Coordinator(preset("cartpole-ppo"), RunDir(Path(folder)), Fanout([]))
    with serve(coordinator, bind_address="127.0.0.1") as server:
        print(server.address, flush=True)
        sys.stdin.read()


def main(arguments: list[str] | None = None) -> None:
    """Measures; prints the cost and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator")
    parser.add_argument("--transport", choices=("auto", "zmq", "courier"), default="auto")
    parser.add_argument("--quick", action="store_true", help="300 reports instead of 3,000")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.serve:
        return _serve(args.serve)
    costs = measure(args.transport, 300 if args.quick else 3000)
    print(f"a report takes {1e6 * costs.report:.0f} us of the coordinator's core")
    print(
        f"a call with the reports of a host takes {1e6 * costs.call:.0f} us, and "
        f"{1e6 * costs.together:.1f} us for each"
    )
    print(json.dumps({"name": NAME, **costs._asdict()}))
    return None


if __name__ == "__main__":
    main()
