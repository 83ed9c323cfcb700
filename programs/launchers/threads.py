"""Runs a program's nodes in threads of this process, so that a debugger stops in any of them."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from programs.launchers import local
from programs.launchers.program import build
from programs.launchers.watch import Watch
from programs.nodes.line import Setup
from programs.tracking.display import ProgressDisplay

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM)


def run_threads(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes in threads of this process; returns the signal that came, or 0."""
    received = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    manager, address = _launch(setup)
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)

        def receive(number: int, frame: Any, handler: Any = handler) -> None:
            received.append(number)
            handler(number, frame)

        signal.signal(number, receive)
    watch = Watch(address, display)
    try:
        with contextlib.suppress(Exception):  # the nodes have written it down
            local.wait(manager)
    finally:
        manager.wait(raise_error=False)
        watch.close()
        _forget(manager)
        for number, handler in before.items():
            signal.signal(number, handler)
    return received[0] if received else 0


def _launch(setup: Setup) -> tuple[Any, str]:
    """Launches all nodes; returns Launchpad's manager and the coordinator's address."""
    local.parse_flags(notice_seconds=-1)  # to kill threads is to kill whoever called
    import launchpad as lp

    wiring = build(setup)
    manager = lp.launch(wiring.program, launch_type="local_mt", serialize_py_nodes=False)
    return manager, wiring.coordinator.address


def _forget(manager: Any) -> None:
    """Has Launchpad, which keeps its signal handlers for good, put them in again next time."""
    from launchpad.launch import worker_manager

    manager._disable_signals()
    worker_manager._SIGNAL_HANDLERS = None
