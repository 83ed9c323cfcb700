"""The process under which Launchpad runs a program's nodes: ``python -m programs.launchers.local``.

It takes the plan (`programs.launchers.processes`) on standard input, prints a line once all nodes
are started, and ends when they have. Launchpad may kill whoever launched a program that does not
end in time, so nobody else should be in that process; and every node waits for it, so it imports
Launchpad and nothing that is heavy.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from programs.nodes import supervise

_NOTICE_SECONDS = 8  # in which nodes end before Launchpad kills them


def wait(manager: Any) -> None:
    """Waits for the coordinator, the last to leave, and ends whoever has not heard of the end.

    A node that was just being restarted has not, and would look for the others in vain.
    """
    labels = [label for label in manager._active_workers if label.startswith("coordinator")]
    manager.wait(labels)
    manager.stop_and_wait()


def forget(commands: Sequence[Mapping[str, Any]]) -> None:
    """Removes the folders in which a program's nodes lie pickled; it must have ended.

    Launchpad leaves that to the end of whoever planned the program, who may have been killed.
    """
    for command in commands:
        words = command["command_as_list"]
        data_file = Path(words[words.index("--data_file") + 1])
        shutil.rmtree(data_file.parent, ignore_errors=True)


def parse_flags(notice_seconds: int) -> None:
    """Has Launchpad's flags parsed; to kill takes it so many seconds, -1 for never."""
    import launchpad.flags  # noqa: F401  (defines them)
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["rlstack", f"--lp_termination_notice_secs={notice_seconds}"])


def main() -> int:
    """The launcher's process."""
    supervise.die_with_parent(signal.SIGTERM)
    parse_flags(_NOTICE_SECONDS)
    from launchpad.launch.local_multi_processing.commands import Command
    from launchpad.launch.run_locally.run_locally import run_commands_locally

    planned = sys.stdin.readline()
    if not planned:  # given up
        return 1
    sys.stdin = open(os.devnull)  # noqa: SIM115  (for good)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Launchpad prints is no answer
    commands = json.loads(planned)
    try:
        manager = run_commands_locally([Command(**c) for c in commands], "output_to_files")
        print("launched", file=answers, flush=True)
        return _wait(manager)
    finally:
        forget(commands)


def _wait(manager: Any) -> int:
    try:
        wait(manager)
    except RuntimeError as error:  # a node's failure; the nodes have written it down
        print(error, file=sys.stderr)
        manager.wait(raise_error=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
