"""The launcher ends all nodes at once, so that a program ends within 10 s whatever fails."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.program import supervisor
from rlstack.programs.program.base import Setup
from rlstack.programs.program.failures import read_failures
from rlstack.programs.program.graph import Node
from rlstack.programs.program.launch import launcher, local, wiring
from rlstack.programs.program.launch.launchpad import supervised
from rlstack.programs.session import module_path, timing
from rlstack.programs.session.run_dir import RunDir
from tests.programs.running import nothing_left

pytestmark = pytest.mark.timeout(60, method="thread")

LATER = [pytest.mark.slow, pytest.mark.chosen]
LAUNCHPAD = module_path.code_of("rlstack.programs.program.launch.launchpad.manager")
LAUNCHERS = [
    pytest.param(launcher.LOCAL, id="processes"),
    pytest.param(LAUNCHPAD, id="launchpad", marks=[pytest.mark.launchpad, *LATER]),
]


class Saver:
    """A node that takes seconds to end, as if it saved."""

    def __init__(self, seconds, stop):
        self._seconds, self._stop = seconds, stop

    def run(self):
        print("up", flush=True)
        self._stop.wait()
        print("told", time.time(), flush=True)
        time.sleep(self._seconds)
        print("ended", time.time(), flush=True)


# The same in a command, as Launchpad starts it.
NODE = """
import sys, threading
from rlstack.programs.program.launch import node_process, signs
from tests.programs.launch.test_ends import Saver
stop = threading.Event()
signs.give()
node_process._stop_on_signals(stop)
node_process.run_to_end(Saver(float(sys.argv[1]), stop).run, stop)
"""


class Program:
    """A launcher with two such nodes."""

    def __init__(self, code, tmp_path, learner, replay):
        self.run_dir = tmp_path
        self.record = tmp_path / "failures.jsonl"
        (tmp_path / "data").mkdir()
        nodes = {"learner": learner, "replay": replay}
        make = self._command if code == LAUNCHPAD else self._node
        described = [make(name, seconds) for name, seconds in nodes.items()]
        graph = [Node(name, Saver, (seconds,), "worker") for name, seconds in nodes.items()]
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": module_path.for_children(),
                "LAUNCHPAD_LOGGING_DIR": str(tmp_path / "logs"),
                supervisor.PARENT: str(os.getpid()),
            },
        )
        self.launcher.stdin.write(json.dumps(described).encode() + b"\n")
        if code != LAUNCHPAD:
            setup = Setup(preset("cartpole-ppo"), RunDir(tmp_path), None)
            self.launcher.stdin.write(pickle.dumps(wiring.Program(graph, setup, {})))
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
        command = [sys.executable, supervised.__file__, str(self.record), name, *times, *node]
        return {"command_as_list": command, "env_overrides": {}, "title": name}

    def _node(self, name, _):
        return dataclasses.asdict(
            local.NodeProcess(
                name,
                run_dir=str(self.run_dir),
                record=str(self.record),
                log=str(self.run_dir / "logs" / name),
                variables={"JAX_PLATFORMS": "cpu"},
                niceness=0,
                grace=timing.GRACE_TO_SAVE,
                silence=0.0,
                max_restarts=0,
            )
        )

    def said(self, name, word):
        """Waits for a line of a node's log; returns its time."""
        until = time.monotonic() + 20.0
        while True:
            for log in (self.run_dir / "logs").glob(f"*{name}*"):  # one, once the node has begun
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


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("code", LAUNCHERS)
@pytest.mark.parametrize(
    "of_supervisor",
    [pytest.param(True, id="supervisor"), pytest.param(False, id="node", marks=LATER)],
)
def test_the_others_end_while_a_node_that_got_a_signal_saves(tmp_path, code, of_supervisor):
    with nothing_left():
        program = Program(code, tmp_path, learner=2.0, replay=1.8)
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
@pytest.mark.parametrize("code", LAUNCHERS)
def test_what_does_not_end_is_killed_within_the_limit(tmp_path, code):
    with nothing_left():
        program = Program(code, tmp_path, learner=60.0, replay=60.0)
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


@pytest.mark.parametrize("code", LAUNCHERS)
@pytest.mark.parametrize("parent", ["gone", "ends"])
def test_a_launcher_that_has_not_started_nodes_leaves_no_files(tmp_path, code, parent):
    """Its parent is killed after it has made the files, and cannot remove them."""
    compiled, keys = tmp_path / "rlstack-program-x", tmp_path / "rlstack-keys-x"
    compiled.mkdir()
    keys.mkdir()
    (keys / "keys").write_text("secret")
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": module_path.for_children(),
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "RLSTACK_KEYS": str(keys / "keys"),
            supervisor.PARENT: "0" if parent == "gone" else str(os.getpid()),
        },
    )
    try:
        if parent == "ends":  # the kernel then sends SIGTERM
            title = ["rlstack:", "launcher", str(tmp_path)]
            while " ".join(psutil.Process(launcher.pid).cmdline()).split() != title:
                time.sleep(0.02)
            launcher.terminate()
        assert launcher.wait(20.0) == -signal.SIGTERM
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdin.close()
    assert not compiled.exists()
    assert not keys.exists()
