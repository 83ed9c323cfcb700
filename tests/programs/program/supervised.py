"""A supervisor to test, and Python code for its child."""

import json
import os
import subprocess
import sys
import time

from rlstack.programs.program.launch.launchpad import supervised
from rlstack.programs.session import module_path, timing

SAYS = "print(os.environ['RLSTACK_INCARNATION'], os.getpid(), flush=True)\n"
WAITS = SAYS + "time.sleep(60)"
TELLS = "from rlstack.programs.program.supervisor import End, tell\n"
ENDS = TELLS + "tell(End(ordered=True))\n"
SIGNS = "from rlstack.programs.program.launch import signs\nsigns.give()\n"


class Supervised:
    """A supervisor with a child that runs Python code."""

    def __init__(self, tmp_path, code, max_restarts=3, grace=5.0, silence=0.0, env=None):
        self.record, self.out = tmp_path / "failures.jsonl", tmp_path / "out"
        child = [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]
        command = [sys.executable, "-S", supervised.__file__, str(self.record), "actor/7"]
        times = map(str, (grace, silence, max_restarts, *timing.RESTARTS))
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(
                [*command, *times, *child],
                stdout=out,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": module_path.for_children(), **(env or {})},
            )

    def wait(self, timeout=20.0):
        self.stderr = self.process.communicate(timeout=timeout)[1].decode()
        return self.process.returncode

    def wait_for_output(self, lines=1):
        until = time.monotonic() + 20.0
        while (text := self.out.read_text()).count("\n") < lines:  # a line may arrive in parts
            assert time.monotonic() < until, text
            time.sleep(0.01)
        return text.splitlines()

    def failures(self):
        return [json.loads(line) for line in self.record.open()] if self.record.exists() else []
