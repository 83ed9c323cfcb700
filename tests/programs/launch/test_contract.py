"""What every launcher does: nodes call one another, faults, signals, logs and the end."""

import dataclasses
import io
import os
import re
import signal
import threading
import time

import pytest

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import Setup
from rlstack.programs.program.failures import cause, read_failures
from rlstack.programs.program.launch import processes, threads
from rlstack.programs.run import launch
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.run_dir import RunDir
from rlstack.types import EnvSpec
from tests.programs.launch.small import small
from tests.programs.running import nothing_left

pytestmark = pytest.mark.timeout(90, method="thread")

LAUNCHPAD = pytest.param("launchpad", marks=[pytest.mark.slow, pytest.mark.chosen])


class Launcher:
    """Runs a small program under a launcher."""

    def __init__(self, how, directory, monkeypatch):
        self.how, self.directory, self.out = how, directory, io.StringIO()
        self._monkeypatch = monkeypatch

    def run(self, what, **changes):
        """Returns the signal that was received, or 0."""
        graph = small(self.directory, what, **changes)
        modules = [processes, threads]
        if self.how == "launchpad":
            from rlstack.programs.program.launch.launchpad import launch as of_launchpad

            modules.append(of_launchpad)
        for module in modules:
            self._monkeypatch.setattr(module, "graph_of", lambda _: graph)
        program = ProgramConfig(num_actors=1, launch=self.how)
        experiment = dataclasses.replace(
            preset("cartpole-ppo"), topology="heavy_env", program=program
        )
        setup = Setup(experiment, self.directory, EnvSpec((), ()))
        with nothing_left(), launch._started(experiment, self.directory) as run:
            return run(setup, ProgressDisplay(100, self.out))

    def wrote(self, name):
        """What a node wrote into a file; None if it is not there."""
        path = self.directory.path / name
        return path.read_text() if path.exists() else None

    def failures(self):
        return read_failures(self.directory.failures)


@pytest.fixture(params=["threads", "processes", LAUNCHPAD])
def launcher(request, tmp_path, monkeypatch):
    return Launcher(request.param, RunDir.create(tmp_path / "run", "test", 1), monkeypatch)


def test_nodes_call_one_another_and_a_failed_one_is_started_again(launcher):
    assert launcher.run("fail once") == 0
    assert (launcher.wrote("worked-0"), launcher.wrote("worked-1")) == ("42", "42")
    assert launcher.wrote("told") is not None
    (failure,) = launcher.failures()
    assert failure["node"] == "actor/0"
    line = r'ArithmeticError: planned \(in .*small.py:\d+: raise ArithmeticError\("planned"\)\)'
    assert re.fullmatch(line, failure["reason"])
    assert (failure["restarts"], failure["incarnation"]) == (True, 0)
    assert f"actor/0: {failure['reason']}; restarts in 0.2 s" in launcher.out.getvalue()
    if launcher.how != "threads":
        logs = launcher.directory.node_logs
        assert (logs / "learner" / "0").read_text() == "doubling\n"
        assert "ArithmeticError: planned" in (logs / "actor" / "0").read_text()


def test_a_node_that_the_program_needs_ends_it_with_its_error(launcher):
    began = time.monotonic()
    assert launcher.run("fail", restartable=False) == 0
    assert time.monotonic() - began < 60.0  # nobody waited for a limit
    assert launcher.wrote("told") is not None
    found = cause(launcher.failures())
    assert (found["node"], found["restarts"]) == ("actor/0", False)
    assert "small.py" in found["traceback"]


def test_a_signal_ends_all_nodes(launcher):
    path = launcher.directory.path

    def interrupt():
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            if (path / "worked-0").exists() and (path / "shown").exists():
                break
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert launcher.run("wait") == signal.SIGINT
    thread.join()
    assert launcher.wrote("told") is not None
    if launcher.how != "threads":  # there the stop event is enough
        assert launcher.wrote("interrupt") == str(int(signal.SIGINT))
    assert [f for f in launcher.failures() if not f.get("ending")] == []
