"""Runs a program's nodes in processes of their own on this machine, under Launchpad."""

from __future__ import annotations

import subprocess
from typing import Any

from rlstack.programs.program.base import Setup
from rlstack.programs.program.launch import processes
from rlstack.programs.program.launch.launchpad import manager
from rlstack.programs.program.topologies import environment, graph_of
from rlstack.programs.session import module_path
from rlstack.programs.session.display import ProgressDisplay

MANAGER = module_path.code_of("rlstack.programs.program.launch.launchpad.manager")


def run_launchpad(process: subprocess.Popen[bytes], setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes as a Launchpad program; returns the signal that was received, or 0.

    Args:
      process: the launcher's process, started with the code `MANAGER`.
      setup: the program's setup.
      display: shows the program's progress.
    """
    commands: list[dict[str, Any]] = []

    def prepare() -> processes.Prepared:
        made, coordinator = commands_of(setup)
        commands.extend(made)
        return processes.Prepared(made, coordinator)

    try:
        return processes.run(process, prepare, setup, display)
    finally:
        manager.forget(commands)


def commands_of(setup: Setup) -> tuple[list[dict[str, Any]], str]:
    """Builds the program for processes, as Launchpad does before it starts them.

    Returns:
      The arguments of Launchpad's command of each node, and the coordinator's address.
    """
    from launchpad import context
    from launchpad.nodes.python.local_multi_processing import PythonProcess

    from rlstack.programs.program.launch.launchpad.program import build

    program, coordinator = build(graph_of(setup), setup)
    for label, nodes in program.groups.items():
        for node in nodes:
            process = PythonProcess(env=environment(label, setup.experiment))
            node._initialize_context(context.LaunchType.LOCAL_MULTI_PROCESSING, process)
    for label, nodes in program.groups.items():
        for node in nodes:
            for handle in node.input_handles:
                handle.connect(node, label)
    for node in program.get_all_nodes():
        node.bind_addresses()
    commands = [
        command
        for label, nodes in program.groups.items()
        for command in nodes[0].to_executables(nodes, label, nodes[0].launch_context)
    ]
    return [vars(command) for command in commands], coordinator.resolve()
