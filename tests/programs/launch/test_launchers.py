"""How launchers monitor a program, and how they end it."""

import io
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import OVER, SAVING
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.launch import processes
from rlstack.programs.program.launch.monitor import ProgramMonitor
from rlstack.programs.session import timing
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import StopSignals
from rlstack.rpc import serve, transports
from rlstack.rpc.addresses import LOOPBACK
from rlstack.storage.loggers import InMemoryLogger
from tests.programs.running import nothing_left

pytestmark = pytest.mark.timeout(60, method="thread")
_LATER = [pytest.mark.slow, pytest.mark.chosen]

STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1], end="", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left(), transports.chosen(transports.default()):
        yield


class Display(ProgressDisplay):
    """A display that records what it shows."""

    def __init__(self):
        super().__init__(100, io.StringIO())
        self.nodes = {}

    def write_nodes(self, nodes):
        self.nodes = nodes


@pytest.fixture
def coordinator(tmp_path):
    directory = RunDir.create(tmp_path / "run", "test", 1)
    return Coordinator(preset("cartpole-ppo"), directory, InMemoryLogger())


def free_address():
    """An address at which no process listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def wait_for(condition):
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_program_whose_coordinator_was_never_heard_is_over_when_interrupted(tmp_path):
    monitor = ProgramMonitor(free_address(), Display(), tmp_path / "none")
    begun = time.monotonic()
    assert monitor.interrupt(signal.SIGINT) == OVER
    assert time.monotonic() - begun < 1.0  # there is no node to wait for
    monitor.close()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("learns", "phase"), [(True, SAVING), pytest.param(False, OVER, marks=_LATER)]
)
def test_the_coordinator_says_whether_something_is_saved(coordinator, tmp_path, learns, phase):
    if learns:
        coordinator.report("learner", 0, 1, {"learner_steps": 1}, {}, {}, 0)
    coordinator.report("actor/0", 0, 2, {"env_frames": 1}, {}, {}, 0)
    address, display = free_address(), Display()
    monitor = ProgramMonitor(address, display, tmp_path / "none")
    time.sleep(1.0)  # the monitor gets no answer, and keeps polling
    with serve(coordinator, port=int(address.rsplit(":", 1)[1]), bind_address=LOOPBACK):
        wait_for(lambda: "actor/0" in display.nodes)
        assert monitor.interrupt(signal.SIGINT) == phase
        assert coordinator.interrupted == signal.SIGINT
    assert monitor.interrupt(signal.SIGINT) == ""  # no answer, but there may be something to save
    monitor.close()


def test_a_note_is_shown_once(coordinator, tmp_path):
    address, display = free_address(), Display()
    monitor = ProgramMonitor(address, display, tmp_path / "none")
    with serve(coordinator, port=int(address.rsplit(":", 1)[1]), bind_address=LOOPBACK):
        for text in ("one", "two"):
            coordinator.note("actor/0", text)
            wait_for(lambda text=text: f"actor/0: {text}" in display.stream.getvalue())
    monitor.close()
    assert display.stream.getvalue().count("actor/0: one") == 1


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("told", [pytest.param("", marks=_LATER), "launched\n"])
def test_what_has_nothing_to_save_is_killed_if_it_does_not_end(tmp_path, told):
    launcher = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, told], stdout=subprocess.PIPE, start_new_session=True
    )
    os.set_blocking(launcher.stdout.fileno(), False)
    signals = StopSignals()
    signals.received = signal.SIGTERM
    time.sleep(0.5)  # the child begins to ignore the signal
    begun = time.monotonic()
    asked = processes._supervise(RunDir(tmp_path), launcher, free_address(), signals, Display())
    assert asked
    assert 2.0 < time.monotonic() - begun < 8.0
    assert launcher.returncode == -signal.SIGKILL
    launcher.stdout.close()


@pytest.mark.parametrize("phase", [SAVING, ""])
def test_a_launcher_that_was_stopped_is_killed_after_the_time_to_save(tmp_path, monkeypatch, phase):
    monkeypatch.setattr(ProgramMonitor, "interrupt", lambda *_: phase)
    monkeypatch.setattr(timing, "INTERRUPTED", 0.3)
    launcher = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, start_new_session=True)
    monkeypatch.setattr(processes, "_has_launched", lambda _: True)
    launcher.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, launcher.pid, os.WSTOPPED | os.WNOWAIT)  # until then SIGTERM would end it
    signals = StopSignals()
    signals.received = signal.SIGTERM
    assert processes._supervise(RunDir(tmp_path), launcher, free_address(), signals, Display())
    assert launcher.returncode == -signal.SIGKILL
    launcher.stdout.close()
