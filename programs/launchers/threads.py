"""Runs a program's nodes in threads of this process, so that a debugger can stop in any of them."""

from __future__ import annotations

import contextlib
import gc
import signal
from typing import Any

from programs.launchers import local
from programs.launchers.monitor import ProgramMonitor
from programs.nodes.base import Setup
from programs.topologies import graph_of
from programs.tracking.display import ProgressDisplay
from programs.tracking.signals import StopSignals

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM)


def run_threads(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes in threads of this process; returns the signal that was received, or 0."""
    with StopSignals(sets_handlers=False):  # Launchpad's handlers end the program
        return _run(setup, display)


def _run(setup: Setup, display: ProgressDisplay) -> int:
    received = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    manager, address = _launch(setup)
    for number in (signal.SIGINT, signal.SIGTERM):
        launchpads = signal.getsignal(number)

        def receive(number: int, frame: Any, handler: Any = launchpads) -> None:
            received.append(number)
            handler(number, frame)

        signal.signal(number, receive)
    monitor = ProgramMonitor(address, display, setup.directory.failures)
    try:
        with contextlib.suppress(Exception):  # which the node has recorded
            local.wait(manager)
    finally:
        manager.wait(raise_error=False)
        monitor.close()
        _forget(manager)
        for number, handler in before.items():
            signal.signal(number, handler)
    return received[0] if received else 0


def _launch(setup: Setup) -> tuple[Any, str]:
    """Launches all nodes; returns Launchpad's manager and the coordinator's address."""
    local.parse_flags(notice_seconds=-1)  # killing threads would kill this process
    import launchpad as lp

    from programs.launchers.launchpad import build

    program, coordinator = build(graph_of(setup), setup)
    manager = lp.launch(program, launch_type="local_mt", serialize_py_nodes=False)
    return manager, coordinator.resolve()


def _forget(manager: Any) -> None:
    """Lets the next program install Launchpad's signal handlers, which are kept in a global."""
    from launchpad.launch import worker_manager

    manager._disable_signals()
    worker_manager._SIGNAL_HANDLERS = None
    # The error of a failed node refers to its frames, and these to the replay's memory.
    manager._first_failure = None
    gc.collect()
