"""A program that ends while a learner compiles: what the others have learned is saved."""

import os
import signal
import threading
import time

import pytest

from programs.nodes.several.learner import FollowingLearnerNode
from programs.tracking.signals import Interrupted
from rlstack.learning.learner import Learner
from rlstack.storage import checkpoint
from tests.programs.policy_sets.test_lost_learners import saved_numbers
from tests.programs.policy_sets.test_topologies import chains
from tests.programs.running import nothing_left, run

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


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
