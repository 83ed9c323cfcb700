"""Runs a program's nodes in processes of their own on this machine, under Launchpad."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

from rlstack.programs.program.base import Setup
from rlstack.programs.program.launch import processes
from rlstack.programs.program.launch.launchpad import manager
from rlstack.programs.program.topologies import environment, graph_of
from rlstack.programs.session import module_path
from rlstack.programs.session.display import ProgressDisplay
from rlstack.rpc.addresses import reserve_port

MANAGER = module_path.code_of("rlstack.programs.program.launch.launchpad.manager")


def run_launchpad(process: subprocess.Popen[bytes], setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes as a Launchpad program; returns the signal that was received, or 0.

    Args:
      process: the launcher's process, started with the code `MANAGER`.
      setup: the program's setup.
      display: shows the program's progress.
    """
    commands: list[dict[str, Any]] = []
    held = contextlib.ExitStack()

    def prepare() -> processes.Prepared:
        made, coordinator = commands_of(setup, held)
        commands.extend(made)
        return processes.Prepared(made, coordinator)

    try:
        with held:
            return processes.run(process, prepare, setup, display)
    finally:
        manager.forget(commands)


def commands_of(setup: Setup, held: contextlib.ExitStack) -> tuple[list[dict[str, Any]], str]:
    """Builds the program for processes, as Launchpad does before it starts them.

    Args:
      setup: the program's setup.
      held: gets the ports that the program takes from a range.

    Returns:
      The arguments of Launchpad's command of each node, and the coordinator's address.
    """
    from launchpad import context
    from launchpad.nodes.python.local_multi_processing import PythonProcess

    from rlstack.programs.program.launch.launchpad.program import FixedAddress, build

    program, coordinator = build(graph_of(setup), setup)
    for label, nodes in program.groups.items():
        for node in nodes:
            process = PythonProcess(env=environment(label, setup.experiment))
            node._initialize_context(context.LaunchType.LOCAL_MULTI_PROCESSING, process)
    for label, nodes in program.groups.items():
        for node in nodes:
            for handle in node.input_handles:
                handle.connect(node, label)
    ports = setup.experiment.program.port_range
    for node in program.get_all_nodes():
        node.bind_addresses()
        for address in node.addresses if ports else ():
            address.bind(FixedAddress(held.enter_context(reserve_port(ports))))
    commands = [
        command
        for label, nodes in program.groups.items()
        for command in nodes[0].to_executables(nodes, label, nodes[0].launch_context)
    ]
    return [vars(command) for command in commands], coordinator.resolve()
