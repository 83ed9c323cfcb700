"""Supervises a command: the process that Launchpad starts for a node.

    python supervised.py RECORD NAME GRACE SILENCE MAX_RESTARTS FIRST_PAUSE LONGEST_PAUSE \
        FORGOTTEN_AFTER AT_ONCE COMMAND...

This is plain Python without the stack's packages, because there is one such process for each node.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from rlstack.programs.program import supervisor


def main(arguments: list[str]) -> int:
    """Supervises by the arguments of the command line; returns the exit code."""
    record, name, grace, silence, max_restarts, *rest = arguments
    times, command = rest[:4], rest[4:]
    restarts = supervisor.RestartPolicy(int(max_restarts), *map(float, times))

    def start(
        told: int, variables: Mapping[str, str], prepare: Callable[[], None]
    ) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **variables}
        return subprocess.Popen(command, env=environment, preexec_fn=prepare, pass_fds=(told,))

    return supervisor.supervise(record, name, float(grace), float(silence), restarts, start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
