"""Runs a program's nodes under Launchpad, in threads here or in processes of their own.

For processes, `plan` makes the commands here, and ``python -m programs.launcher`` runs them: it
takes the plan on standard input, prints a line once all are started, and ends when they have.
Launchpad may kill whoever launched a program that does not end in time, so nobody else should be in
that process; and every node waits for it, so it imports Launchpad and nothing that is heavy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from programs import supervise

if TYPE_CHECKING:
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
    _parse_flags(notice_seconds=-1)  # to kill threads is to kill whoever called
    import launchpad as lp

    wiring = build(setup)
    manager = lp.launch(wiring.program, launch_type="local_mt", serialize_py_nodes=False)
    return manager, wiring.coordinator.address


def wait(manager: Any) -> None:
    """Waits for the coordinator, the last to leave, and ends whoever has not heard of the end.

    A node that was just being restarted has not, and would look for the others in vain.
    """
    labels = [label for label in manager._active_workers if label.startswith("coordinator")]
    manager.wait(labels)
    manager.stop_and_wait()


def forget(manager: Any) -> None:
    """Has Launchpad, which keeps its signal handlers for good, put them in again next time."""
    from launchpad.launch import worker_manager

    manager._disable_signals()
    worker_manager._SIGNAL_HANDLERS = None


class Plan(NamedTuple):
    """What is needed to launch a program's processes."""

    commands: list[dict[str, Any]]  # the arguments of Launchpad's commands
    address: str  # of the coordinator
    folders: list[str]  # where the nodes lie pickled until the program has ended

    def forget(self) -> None:
        """Removes the folders."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def plan(setup: Setup) -> Plan:
    """Builds the program for processes; what Launchpad does with it before it starts any."""
    from launchpad import context
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
    groups = wiring.program.groups
    for label, nodes in groups.items():
        for node in nodes:
            node._initialize_context(
                context.LaunchType.LOCAL_MULTI_PROCESSING, launch_config=resources.get(label)
            )
    for label, nodes in groups.items():
        for node in nodes:
            for handle in node.input_handles:
                handle.connect(node, label)
    for node in wiring.program.get_all_nodes():
        node.bind_addresses()
    commands = [
        command
        for label, nodes in groups.items()
        for command in nodes[0].to_executables(nodes, label, nodes[0].launch_context)
    ]
    folders = {str(Path(_data_file(command.command_as_list)).parent) for command in commands}
    return Plan(
        [vars(command) for command in commands], wiring.coordinator.address, sorted(folders)
    )


def _data_file(command: list[str]) -> str:
    return command[command.index("--data_file") + 1]


def _parse_flags(notice_seconds: int) -> None:
    import launchpad.flags  # noqa: F401  (defines them)
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["rlstack", f"--lp_termination_notice_secs={notice_seconds}"])


def main() -> int:
    """The launcher's process."""
    supervise.die_with_parent(signal.SIGTERM)
    _parse_flags(_NOTICE_SECONDS)
    from launchpad.launch.local_multi_processing.commands import Command
    from launchpad.launch.run_locally.run_locally import run_commands_locally

    planned = sys.stdin.readline()
    if not planned:  # given up
        return 1
    sys.stdin = open(os.devnull)  # noqa: SIM115  (for good)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Launchpad prints is no answer
    commands = [Command(**command) for command in json.loads(planned)]
    manager = run_commands_locally(commands, "output_to_files")
    print("launched", file=answers, flush=True)
    try:
        wait(manager)
    except RuntimeError as error:  # a node's failure; the nodes have written it down
        print(error, file=sys.stderr)
        manager.wait(raise_error=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
