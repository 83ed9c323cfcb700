"""Each process of a program is killed, told to end, or stopped for 15 s and continued.

It happens early (while nodes start), in the middle (after the first update) and late (while the
last params are evaluated), in each topology.
"""

import signal
import time

import pytest

from tests.programs.faults.chaos import blamed, disturb, is_fatal
from tests.programs.launched import Launched
from tests.programs.running import nothing_left, series

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420, method="thread"),
]

MOMENTS = ("early", "middle", "late")
FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP")
TARGETS = {
    "heavy_env": ("coordinator", "learner", "actor/0", "evaluator"),
    "light_env": ("learner", "inferencer/0", "actor/1"),
    "distributed": ("coordinator", "replay", "learner", "inferencer/0", "actor/0"),
}
EVERYWHERE = ("launcher", "supervisor of learner", "supervisor of actor/0")
# These run in continuous integration: the ways in which programs used to hang.
CHOSEN = {
    ("heavy_env", "middle", "coordinator", "SIGSTOP"),
    ("heavy_env", "middle", "learner", "SIGTERM"),
    ("heavy_env", "middle", "launcher", "SIGKILL"),
}
START, END = 240.0, 10.0  # seconds; the end is without the time of a busy machine


def cases():
    for topology, nodes in TARGETS.items():
        for moment in MOMENTS:
            for target in (*nodes, *EVERYWHERE):
                if moment == "late" and target.endswith(("actor/0", "actor/1")):
                    continue  # actors have ended by then
                for fault in FAULTS:
                    case = (topology, moment, target, fault)
                    marks = [pytest.mark.chosen] if case in CHOSEN else []
                    yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def arguments(topology, moment, run_dir):
    frames = 4000 if moment == "late" else 100_000_000
    episodes = 400 if moment == "late" else 2  # so that the last evaluation takes some seconds
    return (
        "cartpole-ppo", "--topology", topology, "--run-dir", run_dir, "--frames", frames,
        "--program.num-actors", 2, "--program.num-inferencers", 2, "--log-period", 1000,
        "--evaluator.episodes", episodes, "--evaluator.num-envs", 2, "--checkpoint-period", 2000,
    )  # fmt: skip


def wait_until(program, moment, target):
    """Waits for the moment in the life of the program."""
    program.wait_for(lambda: target in program.targets(), target, START)
    if moment == "early":
        time.sleep(1.0)
    elif moment == "middle":
        program.wait_for_log("learner/loss", timeout=START)
        program.wait_for(lambda: program.saved_frames() > 0, "a checkpoint", START)
    else:
        program.wait_for(lambda: program.saved_frames() >= 4000, "the last checkpoint", START)


@pytest.mark.parametrize(("topology", "moment", "target", "fault"), list(cases()))
def test_a_fault_ends_the_program_with_the_nodes_name_or_is_survived(
    tmp_path, topology, moment, target, fault
):
    run_dir = tmp_path / "run"
    with Launched(run_dir, *arguments(topology, moment, run_dir)) as program:
        wait_until(program, moment, target)
        saved = program.saved_frames()
        began = disturb(program, target, fault)
        if is_fatal(target, fault):
            code, left = program.end(60)
            took = time.monotonic() - began
            finished = (run_dir / "result.json").exists()  # just before the fault
            assert code == (0 if finished else 1), program.stderr
            assert finished or f"node {blamed(target)} failed" in program.stderr, program.stderr
            assert took < END + (5.0 if left else 0.0), program.stderr
        elif moment == "late":
            code, left = program.end(START)
            assert code == 0, program.stderr
        else:
            go_on(program, run_dir, target, fault)
            program.process.send_signal(signal.SIGINT)
            code, left = program.end(60)
            assert code in (130, 1 if moment == "early" else 130), program.stderr
        assert left == []
        assert program.saved_frames() >= saved


def go_on(program, run_dir, target, fault):
    """Waits until the program has learned on after the fault, and a killed node is back."""
    log = run_dir / "metrics.jsonl"
    steps = series(run_dir, "learner/steps") if log.exists() else []
    program.wait_for_log("learner/steps", at_least=(steps or [0])[-1] + 3, timeout=START)
    if fault != "SIGSTOP":
        program.wait_for(lambda: target in program.nodes(), f"a new {target}", START)
        failures = [f for f in program.failures() if f["node"] == target]
        assert failures, program.stderr
        assert all(f["restarts"] for f in failures)
        # The line on the restart comes when the command next looks at the record of failures.
        program.wait_for(lambda: f"{target}: " in program.stderr, "a line on the restart", 30)
