"""Runs a program's nodes in processes of their own on this machine.

A process of its own, the launcher's (`rlstack.programs.program.launch.local`), starts the nodes.
This module is the other side of it, in the process of the command.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import cloudpickle

from rlstack.programs.program import supervisor
from rlstack.programs.program.base import OVER, SAVING, Setup, is_learner
from rlstack.programs.program.graph import Node
from rlstack.programs.program.launch import launcher, local, wiring
from rlstack.programs.program.launch.monitor import ProgramMonitor
from rlstack.programs.program.topologies import environment, graph_of
from rlstack.programs.session import timing
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import StopSignals


class Prepared(NamedTuple):
    """What a launcher's process reads, and where the coordinator will answer."""

    message: object  # one line of JSON
    coordinator: str
    program: bytes = b""  # pickled, after that line


def run_processes(process: subprocess.Popen[bytes], setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes in processes; returns the signal that was received, or 0.

    Args:
      process: the launcher's process, started with the code `launcher.LOCAL`.
      setup: the program's setup.
      display: shows the program's progress.
    """
    graph = graph_of(setup)
    with wiring.on_this_host(graph, setup) as program:
        return run_part(process, program, wiring.indexed(graph), display)


def run_part(
    process: subprocess.Popen[bytes],
    program: wiring.Program,
    nodes: Sequence[tuple[Node, int]],
    display: ProgressDisplay,
    incarnations: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Runs the nodes of a program that belong here; returns the signal that was received, or 0.

    Args:
      process: the launcher's process, started with the code `launcher.LOCAL`.
      program: the program.
      nodes: its nodes that run on this host, each with its index in its group.
      display: shows the program's progress.
      incarnations: the first incarnation of nodes that have run before, by name.
    """
    setup = program.setup

    def prepare() -> Prepared:
        described = [
            vars(_described(node, index, setup, incarnations.get(node.name, 0)))
            for node, index in nodes
        ]
        return Prepared(described, program.addresses["coordinator"], cloudpickle.dumps(program))

    vital = not all(node.restartable for node, _ in nodes)
    return run(process, prepare, setup, display, ends_program=vital)


def _described(node: Node, index: int, setup: Setup, incarnation: int = 0) -> local.NodeProcess:
    cfg = setup.experiment.program
    # This process has made an environment too, so these nodes import EnvPool if it has.
    makes_environments = node.group in ("actor", "evaluator")
    return local.NodeProcess(
        name=node.name,
        run_dir=str(setup.directory.path),
        record=str(setup.directory.failures),
        log=str(setup.directory.node_logs / node.group / str(index)),
        variables=environment(node.group, setup.experiment),
        niceness=getattr(node.cls, "niceness", 0),
        grace=grace_of(node),
        silence=cfg.silence_seconds,
        max_restarts=cfg.max_restarts if node.restartable else 0,
        envpool=makes_environments and "envpool" in sys.modules,
        incarnation=incarnation,
    )


def grace_of(node: Node) -> float:
    """Returns the seconds from a signal until a node is killed."""
    saves = not node.restartable or is_learner(node.name)
    return timing.GRACE_TO_SAVE if saves else timing.GRACE


@contextlib.contextmanager
def started(
    code: str, directory: RunDir, log: str = "launcher"
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a launcher's process, which imports what nodes need; ends it at the end of the body.

    Args:
      code: Python code that the process runs.
      directory: the run directory.
      log: the name of the file for the process's output.
    """
    directory.node_logs.mkdir(exist_ok=True)
    try:
        with launcher.started(code, directory.path, directory.node_logs / log) as process:
            yield process
    finally:
        _sweep()


def run(
    process: subprocess.Popen[bytes],
    prepare: Callable[[], Prepared],
    setup: Setup,
    display: ProgressDisplay,
    *,
    ends_program: bool = True,
) -> int:
    """Runs a program under a launcher's process; returns the signal that was received, or 0.

    Args:
      process: the launcher's process, from `started`.
      prepare: makes the input of the launcher.
      setup: the program's setup.
      display: shows the program's progress.
      ends_program: whether a signal ends the program; False if it ends only what runs here, which
        the program can do without.
    """
    with StopSignals(display.write_line) as signals:
        prepared = prepare()
        _send(prepared, process)
        coordinator = prepared.coordinator
        asked = _supervise(
            setup.directory, process, coordinator, signals, display, ends_program=ends_program
        )
        if not asked:
            _record_end(setup.directory, process.returncode)
            _wait_for_nodes(process)
        return signals.received or 0


def _supervise(
    directory: RunDir,
    process: subprocess.Popen[bytes],
    coordinator: str,
    signals: StopSignals,
    display: ProgressDisplay,
    *,
    ends_program: bool = True,
) -> bool:
    """Waits for the end of the launcher, shows progress, and ends the program on a signal.

    Returns:
      Whether the launcher was asked to end.
    """
    monitor: ProgramMonitor | None = None
    phase, deadline = "", math.inf
    # The caller deletes the keys that the monitor's thread needs, so the thread always ends here.
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as starting:
        starting.enter_context(display.phase("starting the nodes"))
        while process.poll() is None:
            if monitor is not None and monitor.has_answered:
                starting.close()
            if monitor is None and _has_launched(process):
                monitor = ProgramMonitor(coordinator, display, directory.failures)
                opened.callback(monitor.close)
            if signals.received and deadline == math.inf:
                told = monitor if ends_program else None
                phase = told.interrupt(signals.received) if told else OVER
                if phase != SAVING:
                    process.terminate()
                patience = timing.INTERRUPTED
                if phase == OVER:
                    patience = timing.INTERRUPTED_WITHOUT_STATE
                deadline = time.monotonic() + patience
            if time.monotonic() > deadline:
                if phase == OVER:
                    launcher.kill(process)
                else:
                    process.terminate()
                    phase = OVER  # killed next: a launcher that was stopped ends in no other way
                deadline = time.monotonic() + timing.INTERRUPTED
            time.sleep(timing.LAUNCHER_POLL)
    return deadline != math.inf


def _record_end(directory: RunDir, code: int) -> None:
    """Records that the launcher was killed, or told to end by a signal that was not sent here."""
    if code < 0 or code > 128:
        end = supervisor.End(reason=supervisor.describe(code if code < 0 else 128 - code))
        supervisor.record_failure(str(directory.failures), node="launcher", end=end, restarts=False)


def _wait_for_nodes(process: subprocess.Popen[bytes]) -> None:
    """Waits for nodes that outlive a killed launcher; their supervisors end them, and they save."""
    until = time.monotonic() + timing.NODES_NOTICE
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(timing.LAUNCHER_POLL)


def _send(prepared: Prepared, process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(prepared.message).encode() + b"\n" + prepared.program)


def _has_launched(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return bool(process.stdout.readline())


def _sweep() -> None:
    """Removes blocks and folders of shared memory that killed nodes left behind."""
    from rlstack.programs.program import host
    from rlstack.replay.shared_memory import block

    block.sweep()
    host.sweep()
