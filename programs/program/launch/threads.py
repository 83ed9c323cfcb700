"""Runs a program's nodes in threads of this process, so that a debugger can stop in any of them."""

from __future__ import annotations

import gc
import queue
import threading
import time
from typing import NamedTuple

from rlstack.programs.build.devices import acting_of, num_services
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.program import base, supervisor
from rlstack.programs.program.base import Setup
from rlstack.programs.program.graph import Node
from rlstack.programs.program.launch import wiring
from rlstack.programs.program.launch.monitor import ProgramMonitor
from rlstack.programs.program.launch.wiring import Program
from rlstack.programs.program.stopping import end_of
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session import timing
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.signals import StopSignals


class _Ended(NamedTuple):
    """The end of a node's thread."""

    node: str
    failed: bool


def run_threads(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes in threads of this process; returns the signal that was received, or 0."""
    graph = graph_of(setup)
    setup.configure_jax_of_threads()
    _tell_who_acts(setup.experiment, display)
    with StopSignals(display.write_line) as signals, wiring.on_this_host(graph, setup) as program:
        stop, ends = threading.Event(), queue.SimpleQueue[_Ended]()
        threads = [
            threading.Thread(
                target=_run, args=(program, node, stop, ends), name=node.name, daemon=True
            )
            for node in graph.nodes
        ]
        monitor = ProgramMonitor(
            program.addresses["coordinator"], display, setup.directory.failures
        )
        try:
            for thread in threads:
                thread.start()
            _wait(ends, signals)
        finally:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            monitor.close()
            gc.collect()  # the error of a failed node refers to its frames, and these to the replay
        return signals.received or 0


def _tell_who_acts(experiment: Experiment, display: ProgressDisplay) -> None:
    """Writes whether actors act by themselves, where there is a choice."""
    if experiment.topology == "heavy_env" and experiment.num_actors > 1:
        shared, why = acting_of(experiment)
        threads = num_services(experiment) if shared else experiment.num_actors
        display.write_line(
            f"{threads} of the threads act for {experiment.num_actors} actors, {why}"
        )


def _wait(ends: queue.SimpleQueue[_Ended], signals: StopSignals) -> None:
    """Waits for the coordinator, which ends last, for a failure, or for a signal.

    A node that was being restarted may not know that the program is over; it would wait for nodes
    that have ended.
    """
    while signals.received is None:
        try:
            end = ends.get(timeout=timing.LAUNCHER_POLL)
        except queue.Empty:
            continue
        if end.failed or end.node == "coordinator":
            return


def _run(
    program: Program, node: Node, stop: threading.Event, ends: queue.SimpleQueue[_Ended]
) -> None:
    """Runs a node until it ends as ordered or fails for good."""
    failed = True
    try:
        failed = not _run_with_restarts(program, node, stop)
    finally:
        ends.put(_Ended(node.name, failed))


def _run_with_restarts(program: Program, node: Node, stop: threading.Event) -> bool:
    """Restarts a node after failures where that is safe; returns whether it ended as ordered."""
    limit = program.setup.experiment.program.max_restarts if node.restartable else 0
    restarts = supervisor.RestartPolicy(limit, *timing.RESTARTS)
    while not stop.is_set():
        started = time.monotonic()
        incarnation = restarts.failures
        base.set_incarnation(incarnation)
        try:
            wiring.run_node(program, node.name, stop)
            return True
        except BaseException as error:  # also SystemExit, which ends a thread without a trace
            end = end_of(error, base.ran_seconds())
        pause = restarts.failed(time.monotonic() - started, end)
        supervisor.record_failure(
            str(program.setup.directory.failures),
            node=node.name,
            end=end,
            incarnation=incarnation,
            restarts=pause is not None,
            pause=pause,
            ending=stop.is_set(),
        )
        if pause is None:
            return False
        stop.wait(pause)
    return True
