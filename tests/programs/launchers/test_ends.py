"""The launcher ends all nodes at once, so that a program ends within 10 s whatever fails."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from programs import timing
from programs.launchers import processes
from programs.nodes import supervisor
from programs.nodes.failures import read_failures
from tests.programs.running import nothing_left

pytest.importorskip("launchpad")
pytestmark = [pytest.mark.reference, pytest.mark.timeout(60, method="thread")]

NODE = """
import signal, sys, time
from programs.launchers import signs
from programs.nodes import supervisor
seconds = float(sys.argv[1])
signs.give()

def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("told", time.time(), flush=True)
    time.sleep(seconds)
    supervisor.tell(supervisor.STOPPED)
    print("ended", time.time(), flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(60)
"""


class Program:
    """A launcher with two nodes that take seconds to end, as if they saved."""

    def __init__(self, tmp_path, learner, replay):
        self.run_dir = tmp_path
        self.record = tmp_path / "failures.jsonl"
        (tmp_path / "data").mkdir()
        commands = [self._command("learner", learner), self._command("replay", replay)]
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", processes._LAUNCHER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "LAUNCHPAD_LOGGING_DIR": str(tmp_path / "logs"),
                supervisor.PARENT: str(os.getpid()),
            },
        )
        self.launcher.stdin.write(json.dumps(commands).encode() + b"\n")
        self.launcher.stdin.close()
        assert self.launcher.stdout.readline() == b"launched\n"
        for name in ("learner", "replay"):
            self.said(name, "up")

    def _command(self, name, seconds):
        grace = str(timing.GRACE_TO_SAVE)
        times = map(str, (grace, 0.0, 0, *timing.RESTARTS))
        node = [
            sys.executable,
            "-c",
            NODE,
            str(seconds),
            "--data_file",
            str(self.run_dir / "data/x"),
        ]
        command = [sys.executable, supervisor.__file__, str(self.record), name, *times, *node]
        return {"command_as_list": command, "env_overrides": {}, "title": name}

    def said(self, name, word):
        """Waits for a line of a node's log; returns its time."""
        until = time.monotonic() + 20.0
        (log,) = (self.run_dir / "logs").glob(f"*{name}*") or [None]
        while True:
            for line in log.read_text().splitlines():
                if line.split()[0] == word:
                    return float(line.split()[-1]) if " " in line else 0.0
            assert time.monotonic() < until, f"{name} did not say {word}"
            time.sleep(0.02)

    def process(self, name, of_supervisor):
        """Returns the process id of a node or its supervisor."""
        title = f"rlstack: supervisor:{name} {self.run_dir}"
        supervisors = psutil.Process(self.launcher.pid).children()
        (found,) = [p for p in supervisors if " ".join(p.cmdline()).strip() == title]
        return found.pid if of_supervisor else found.children()[0].pid


LATER = [pytest.mark.slow, pytest.mark.chosen]


@pytest.mark.parametrize(
    "of_supervisor",
    [pytest.param(True, id="supervisor"), pytest.param(False, id="node", marks=LATER)],
)
def test_the_others_end_while_a_node_that_got_a_signal_saves(tmp_path, of_supervisor):
    with nothing_left():
        program = Program(tmp_path, learner=2.0, replay=1.8)
        try:
            began = time.time()
            pid = program.process("learner", of_supervisor)
            subprocess.run(["kill", str(pid)], check=True)
            assert program.said("replay", "told") < began + 1.5
            assert program.launcher.wait(10.0) == 1
            assert (
                program.said("replay", "ended") < program.said("learner", "ended") + 1.0
            )  # not 1.8
        finally:
            program.launcher.kill()
            program.launcher.wait()
            program.launcher.stdout.close()
    (failure,) = read_failures(program.record)
    assert (failure["node"], failure["restarts"]) == ("learner", False)
    assert "by a signal" in failure["reason"] or "got a signal" in failure["reason"]


@pytest.mark.slow
@pytest.mark.chosen
def test_what_does_not_end_is_killed_within_the_limit(tmp_path):
    with nothing_left():
        program = Program(tmp_path, learner=60.0, replay=60.0)
        try:
            began = time.time()
            os.kill(program.process("learner", True), signal.SIGKILL)
            program.launcher.wait(15.0)
            assert time.time() - began < 9.0
        finally:
            program.launcher.kill()
            program.launcher.wait()
            program.launcher.stdout.close()
    assert read_failures(program.record)[0]["node"] == "learner"
