"""What is saved when a program ends while a learner compiles."""

import os
import signal
import threading
import time

import pytest

from rlstack.learning.learner import Learner
from rlstack.programs.program.multi_policy.learner import FollowingLearnerNode
from rlstack.programs.run import train
from rlstack.programs.session.signals import Interrupted
from rlstack.storage import checkpoint
from tests.programs.multi_policy.test_lost_learners import saved_numbers
from tests.programs.multi_policy.test_topologies import chains
from tests.programs.running import nothing_left, ppo, run

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


@pytest.mark.slow
@pytest.mark.chosen
def test_a_learner_that_was_never_told_the_frames_of_the_run_saves_nothing(tmp_path, monkeypatch):
    """It has learned nothing, and must not write a checkpoint at frame 0."""
    run(ppo("heavy_env", frames=600), tmp_path / "run")
    saved = checkpoint.paths(tmp_path / "run" / "checkpoints")
    compile_ = Learner.compile

    def interrupted(learner, spec):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # all threads are told to stop
        compile_(learner, spec)

    monkeypatch.setattr(Learner, "compile", interrupted)
    with pytest.raises(Interrupted):
        train.resume(tmp_path / "run", frames=100_000)
    assert checkpoint.paths(tmp_path / "run" / "checkpoints") == saved


@pytest.mark.slow
@pytest.mark.chosen
def test_an_interruption_while_the_first_learner_compiles_saves_the_updates_of_another(
    tmp_path, monkeypatch
):
    write, compile_, interrupted = FollowingLearnerNode.write, Learner.compile, threading.Event()

    def compile_late(learner, spec):
        if threading.current_thread().name == "learner/retailer":
            interrupted.wait(60.0)
            time.sleep(0.5)  # all threads are told to stop
        compile_(learner, spec)

    def interrupt(node, step, logs):
        write(node, step, logs)
        if step == 2:
            while not node._poll(now=True).env_frames:
                time.sleep(0.05)
            interrupted.set()
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Learner, "compile", compile_late)
    monkeypatch.setattr(FollowingLearnerNode, "write", interrupt)
    with pytest.raises(Interrupted):
        run(chains("heavy_env", 10_000_000), tmp_path / "run")
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert checkpoint.read_metadata(path)["env_frames"] > 0
    assert saved_numbers(tmp_path / "run", "distributor")[0] >= 2
    assert saved_numbers(tmp_path / "run", "retailer")[0] == 0
