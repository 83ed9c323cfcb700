"""Runs a program's nodes in processes of their own on this machine, under Launchpad."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from programs.launchers import local
from programs.launchers.program import build, environment
from programs.launchers.watch import Watch
from programs.nodes.coordination import OVER, SAVING
from programs.nodes.line import Setup
from programs.tracking.display import ProgressDisplay
from programs.tracking.run_dir import RunDir
from programs.tracking.signals import StopSignals

_LOOK = 0.1  # seconds between two looks at the launcher
# Seconds after an interruption in which a program ends by itself, and one with nothing to save.
_PATIENCE, _HURRY = 20.0, 3.0


def run_processes(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes under a launcher of their own; returns the signal that came, or 0."""
    with StopSignals() as signals, _launcher(setup.directory) as process:
        plan = plan_of(setup)  # while the launcher starts
        try:
            _send(plan.commands, process)
            _watch(process, plan.address, signals, display)
        finally:
            local.forget(plan.commands)
        return signals.received or 0


def _watch(
    process: subprocess.Popen[bytes], address: str, signals: StopSignals, display: ProgressDisplay
) -> None:
    """Until the launcher ends; passes signals on."""
    watch: Watch | None = None
    phase, until = "", math.inf
    while process.poll() is None:
        if watch is None and _has_launched(process):
            watch = Watch(address, display)
        if signals.received and until == math.inf:
            phase = watch.interrupt(signals.received) if watch else OVER
            if phase != SAVING:
                process.terminate()
            until = time.monotonic() + (_HURRY if phase == OVER else _PATIENCE)
        if time.monotonic() > until:
            if phase == OVER:
                _kill(process)
            else:
                process.terminate()
            until = time.monotonic() + _PATIENCE
        time.sleep(_LOOK)
    if watch is not None:
        watch.close()


@contextlib.contextmanager
def _launcher(directory: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher's process, in a session of its own: a terminal's Ctrl-C is for us alone."""
    directory.node_logs.mkdir(exist_ok=True)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "LAUNCHPAD_LOGGING_DIR": str(directory.node_logs),
    }
    with open(directory.node_logs / "launcher", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "programs.launchers.local"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=variables,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        _kill(process)
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        _sweep()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher and all that it started, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _send(commands: list[dict[str, Any]], process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(commands).encode() + b"\n")


def _has_launched(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return bool(process.stdout.readline())


class Plan(NamedTuple):
    """What is needed to launch a program's processes."""

    commands: list[dict[str, Any]]  # the arguments of Launchpad's commands
    address: str  # of the coordinator


def plan_of(setup: Setup) -> Plan:
    """Builds the program for processes; what Launchpad does with it before it starts any."""
    from launchpad import context
    from launchpad.nodes.python.local_multi_processing import PythonProcess

    wiring = build(setup)
    groups = wiring.program.groups
    for label, nodes in groups.items():
        for node in nodes:
            process = PythonProcess(env=environment(label))
            node._initialize_context(context.LaunchType.LOCAL_MULTI_PROCESSING, process)
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
    return Plan([vars(command) for command in commands], wiring.coordinator.address)


def _sweep() -> None:
    """Removes what killed nodes left in shared memory."""
    from rlstack.replay.shared_memory import block

    block.sweep()
