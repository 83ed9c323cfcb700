"""The coordinator's cost of a report: `python -m benchmarks.coordinator [--transport zmq]`.

A coordinator runs in a process of its own, without a program. This process sends it the reports of
many nodes, one after another, as actors send them. The kernel reports the processor time that the
coordinator takes. It has no logs to write, so the figure is that of the reports only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

from rlstack.programs.config.presets import preset
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import RemoteObject, serve, transports
from rlstack.storage.loggers import Fanout

NAME = "coordinator"
_NODES = 100
_LOGS = {"actor/episode_return": np.ones(2), "actor/episode_length": np.ones(2)}


def measure(transport: str = "auto", reports: int = 3000) -> float:
    """Returns the seconds of a core that the coordinator takes for a report.

    Args:
      transport: that carries the reports: zmq, courier, or auto for the default here.
      reports: number of reports.
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
            _report(client, _NODES)
            process = psutil.Process(child.pid)
            before = process.cpu_times()
            _report(client, reports)
            after = process.cpu_times()
            client.close()
            return (after.user + after.system - before.user - before.system) / reports
        finally:
            child.kill()
            child.communicate()


def _report(client: RemoteObject, count: int) -> None:
    for number in range(count):
        node, batch = f"actor/{number % _NODES}", number // _NODES + 1
        counts, gauges = {"env_frames": 0.0}, {"params/version": 1.0}
        client.report(node, 0, 1, counts, gauges, _LOGS, batch)


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
    seconds = measure(args.transport, 300 if args.quick else 3000)
    print(f"a report takes {1e6 * seconds:.0f} us of the coordinator's core")
    print(json.dumps({"name": NAME, "report": seconds}))
    return None


if __name__ == "__main__":
    main()
