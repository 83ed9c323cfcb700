"""A node that is stopped for ever is killed: it is started again, or the program ends."""

import signal
import time

import psutil
import pytest

from rlstack.programs.session import timing
from tests.programs.launched import FAST, Launched
from tests.programs.running import metrics, nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, method="thread")]


def started(run_dir, topology, *options):
    return Launched(
        run_dir, "cartpole-ppo", "--topology", topology, "--frames", 100_000_000, *FAST,
        "--program.silence-seconds", 6, "--run-dir", run_dir, *options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["actor/0", "inferencer/0", "evaluator"])
def test_a_restartable_node_that_is_stopped_is_started_again(tmp_path, name):
    with nothing_left(), started(tmp_path / "run", "light_env") as program:
        program.wait_for_update()
        program.nodes()[name].suspend()
        program.wait_for(lambda: f"{name}: it gave no sign of life for 6 s" in program.stderr, name)
        program.wait_for_log("program/restarts", at_least=1)
        program.process.send_signal(signal.SIGINT)
        assert program.end(30) == (130, [])


@pytest.mark.parametrize(
    ("topology", "name"), [("distributed", "replay"), ("heavy_env", "learner")]
)
def test_another_node_that_is_stopped_ends_the_program_with_its_name(tmp_path, topology, name):
    with nothing_left(), started(tmp_path / "run", topology) as program:
        program.wait_for_update()
        program.nodes()[name].suspend()
        began = time.monotonic()
        code, left = program.end(60)
        assert time.monotonic() - began < 6.0 + 2.0 + 10.0
        assert (code, left) == (1, [])
        assert f"node {name} failed: it gave no sign of life for 6 s" in program.stderr


@pytest.mark.parametrize(
    ("topology", "launch"), [("light_env", "processes"), ("heavy_env", "threads")]
)
def test_a_program_that_is_stopped_as_a_whole_goes_on_afterwards(tmp_path, topology, launch):
    """As when the machine sleeps; for longer than any node waits for another."""
    with nothing_left(), started(tmp_path / "run", topology, "--launch", launch) as program:
        program.wait_for_update()
        everything = [psutil.Process(program.process.pid), *program.processes()]
        for process in everything:
            process.suspend()
        time.sleep(timing.COORDINATOR_LOST_TO_OTHERS + 2.0)
        frames = metrics(tmp_path / "run")[-1]["env_frames"]
        for process in reversed(everything):
            process.resume()
        program.wait_for_log("env_frames", at_least=frames + 10_000)
        program.process.send_signal(signal.SIGINT)
        assert program.end(30) == (130, [])
        assert program.failures() == []
