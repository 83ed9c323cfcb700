"""The launcher's process, in which Launchpad runs a program's nodes.

    python -m rlstack.programs.program.launch.launchpad.manager RUN_DIR

It does what `rlstack.programs.program.launch.local` does, with Launchpad's manager of processes. It
is a separate process because Launchpad kills the process that launched a program if the program
does not end in time. Every node waits for this process, so Launchpad is its only heavy import.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rlstack.programs.program import supervisor
from rlstack.programs.program.launch import local
from rlstack.programs.session import timing


def forget(commands: Sequence[Mapping[str, Any]]) -> None:
    """Removes the folders with a program's pickled nodes; call it after the program's end.

    Launchpad does so when the process that made the folders exits, but that process may be killed.
    """
    for command in commands:
        words = command["command_as_list"]
        data_file = Path(words[words.index("--data_file") + 1])
        shutil.rmtree(data_file.parent, ignore_errors=True)


def parse_flags(notice_seconds: float) -> None:
    """Parses Launchpad's flags.

    Args:
      notice_seconds: seconds from SIGTERM to SIGKILL for nodes that do not end; -1 for no SIGKILL.
    """
    import launchpad.flags  # noqa: F401  (defines them)
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["rlstack", f"--lp_termination_notice_secs={notice_seconds:g}"])


def main() -> int:
    """Runs the launcher's process; returns its exit code."""
    answers = local.begin()
    commands: list[dict[str, Any]] = []
    try:
        parse_flags(timing.NODES_NOTICE)
        from launchpad.launch.local_multi_processing.commands import Command
        from launchpad.launch.run_locally.run_locally import run_commands_locally

        received = local.receive()
        if received is None:
            return 1
        commands.extend(received)
        sys.stdin = open(os.devnull)  # noqa: SIM115  (stays open)
        ending: list[int] = []
        signal.signal(supervisor.ENDING, lambda number, _: ending.append(number))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else Launchpad calls the handler too
        manager = run_commands_locally([Command(**c) for c in commands], "output_to_files")
        signals = _remember_signals()
        print("launched", file=answers, flush=True)
        code = _wait(manager, signals, ending)
        if signals:  # on which Launchpad stops all nodes itself
            manager.wait(raise_error=False)
        else:
            manager.stop_and_wait()
        return code
    finally:
        forget(commands)
        local.clean()


def _remember_signals() -> list[int]:
    """Returns a list of the signals that asked this process to end; Launchpad handles them."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        launchpads: Any = signal.getsignal(number)

        def receive(number: int, frame: FrameType | None, handler: Any = launchpads) -> None:
            received.append(number)
            handler(number, frame)

        signal.signal(number, receive)
    return received


def _wait(manager: Any, signals: list[int], ending: list[int]) -> int:
    """Waits for the coordinator, which ends last, for a failure, or for a signal.

    Launchpad's own wait does not say which process ended, so a supervisor that was killed would
    leave no trace.

    Args:
      manager: Launchpad's manager.
      signals: the signals that asked this process to end.
      ending: not empty once a node that the program needs ends because of a signal.
    """
    groups = manager._active_workers
    workers = [(name, worker) for name in groups for worker in groups[name]]
    while not signals:
        if ending:  # the others end while that node saves
            return 1
        for group, worker in workers:
            code = worker.poll()
            if code:
                _, _, record, name, *_ = worker.args
                local.record_end_of_supervisor(record, name, code)
                return 1
            if code == 0 and group.startswith("coordinator"):
                return 0
        time.sleep(timing.LAUNCHER_POLL)
    return 128 + signals[0]


if __name__ == "__main__":
    sys.exit(main())
