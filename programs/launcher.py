"""Runs a program's nodes under Launchpad, in threads here or in processes of their own.

As a process (``python -m programs.launcher``, the pickled setup on standard input) it launches the
nodes, prints the coordinator's address, and ends when they have. Launchpad may kill whoever
launched a program that does not end in time, so nobody else should be in that process.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

from programs import supervise
from programs.nodes.line import Setup

_NOTICE_SECONDS = 8  # in which nodes end before Launchpad kills them


def build(setup: Setup) -> Any:
    """Returns the setup's topology as a `programs.wiring.Wiring`."""
    from programs.distributed import distributed
    from programs.heavy_env import heavy_env
    from programs.light_env import light_env

    topologies: dict[str, Callable[[Setup], Any]] = {
        "heavy_env": heavy_env,
        "light_env": light_env,
        "distributed": distributed,
    }
    return topologies[setup.experiment.topology](setup)


def launch_threads(setup: Setup) -> tuple[Any, str]:
    """Launches all nodes in threads; returns Launchpad's manager and the coordinator's address."""
    _parse_flags()
    import launchpad as lp

    wiring = build(setup)
    manager = lp.launch(wiring.program, launch_type="local_mt", serialize_py_nodes=False)
    return manager, wiring.coordinator.address


def forget(manager: Any) -> None:
    """Has Launchpad, which keeps its signal handlers for good, put them in again next time."""
    from launchpad.launch import worker_manager

    manager._disable_signals()
    worker_manager._SIGNAL_HANDLERS = None


def launch_processes(setup: Setup) -> tuple[Any, str]:
    """Launches each node in a process; returns Launchpad's manager and the address."""
    os.environ["LAUNCHPAD_LOGGING_DIR"] = str(setup.directory.node_logs)  # read at import
    _parse_flags()
    import launchpad as lp
    from launchpad.nodes.python.local_multi_processing import PythonProcess

    wiring = build(setup)
    # On a machine with an accelerator it is the learner's and the inference services'.
    on_cpu = PythonProcess(env={"JAX_PLATFORMS": "cpu"})
    shares = PythonProcess(env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    resources = {
        "coordinator": on_cpu,
        "actor": on_cpu,
        "evaluator": on_cpu,
        "replay": on_cpu,
        "inferencer": shares,
    }
    manager = lp.launch(
        wiring.program,
        launch_type="local_mp",
        terminal="output_to_files",
        local_resources={k: v for k, v in resources.items() if k in wiring.program.groups},
    )
    return manager, wiring.coordinator.address


def _parse_flags() -> None:
    import launchpad.flags  # noqa: F401  (defines them)
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["rlstack", f"--lp_termination_notice_secs={_NOTICE_SECONDS}"])


def main() -> int:
    """The launcher's process."""
    supervise.die_with_parent(signal.SIGTERM)
    setup: Setup = pickle.load(sys.stdin.buffer)
    sys.stdin = open(os.devnull)  # noqa: SIM115  (for good)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Launchpad prints is no answer
    manager, address = launch_processes(setup)
    print(address, file=answers, flush=True)
    try:
        manager.wait()
    except RuntimeError as error:  # a node's failure; the nodes have written it down
        print(error, file=sys.stderr)
        manager.wait(raise_error=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
