"""Every process of a program gets a signal at once, as from a job scheduler."""

import contextlib
import signal
import time

import psutil
import pytest

from tests.programs.launched import FAST, Launched
from tests.programs.running import TOPOLOGIES, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400, method="thread")]

ENDLESS = ("--frames", 100_000_000, "--checkpoint-period", 2000)


def partial_files(run_dir):
    """What is written under a temporary name, and renamed when it is whole."""
    return [p.name for p in run_dir.rglob(".*") if p.name != ".lock"]


@pytest.mark.parametrize("topology", ["single_process", *TOPOLOGIES])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signal_to_all_processes_leaves_nothing_and_the_run_resumes(tmp_path, topology, number):
    run_dir = tmp_path / "run"
    args = ("cartpole-ppo", "--topology", topology, *ENDLESS, *FAST, "--run-dir", run_dir)
    with nothing_left(), Launched(run_dir, *args) as program:
        program.wait_for(lambda: program.saved_frames() > 0, "a checkpoint", timeout=150.0)
        processes = program.processes()
        program.process.send_signal(number)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                process.send_signal(number)
        sent = time.monotonic()
        code, left = program.end(30)
        assert time.monotonic() - sent < 10.0
        assert code == (143 if number == signal.SIGTERM else -signal.SIGKILL), program.stderr
        if number == signal.SIGTERM:  # a killed program cannot remove its temporary files
            assert left == []
            assert partial_files(run_dir) == []
        assert [p for p in processes if p.is_running() and p.status() != "zombie"] == []
        saved = program.saved_frames()
        assert saved > 0
    again = ("--resume", run_dir, "--frames", saved + 3000)
    with nothing_left(), Launched(run_dir, *again) as program:
        assert program.end(120)[0] == 0, program.stderr
        assert partial_files(run_dir) == []
