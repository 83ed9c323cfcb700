"""Every process of a program gets a signal at once, as from a job scheduler."""

import signal

import pytest

from tests.programs.launched import FAST, Launched
from tests.programs.running import nothing_left

pytest.importorskip("launchpad")
pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.timeout(400, method="thread")]

ENDLESS = ("--frames", 100_000_000, "--checkpoint-period", 2000)


@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_all_processes_leaves_nothing_and_the_run_resumes(tmp_path, topology, number):
    run_dir = tmp_path / "run"
    args = ("cartpole-ppo", "--topology", topology, *ENDLESS, *FAST, "--run-dir", run_dir)
    with nothing_left(), Launched(run_dir, *args) as program:
        program.wait_for(lambda: program.saved_frames() > 0, "a checkpoint", timeout=150.0)
        processes = program.processes()
        program.process.send_signal(number)
        for process in processes:
            if process.is_running():
                process.send_signal(number)
        _, left = program.end(30)
        if number == signal.SIGTERM:  # a killed program cannot remove its temporary files
            assert left == []
            assert [p.name for p in run_dir.rglob(".*") if p.is_file()] == []
        assert [p for p in processes if p.is_running() and p.status() != "zombie"] == []
        saved = program.saved_frames()
        assert saved > 0
    again = ("--resume", run_dir, "--frames", saved + 3000)
    with nothing_left(), Launched(run_dir, *again) as program:
        assert program.end(120)[0] == 0, program.stderr
        assert [p.name for p in run_dir.rglob(".*") if p.is_file()] == []
