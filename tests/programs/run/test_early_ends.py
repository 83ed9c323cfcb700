"""A resumed program that ends before its learner knows the frames of the run."""

import os
import signal
import time

import pytest

from programs.run import train
from programs.tracking.signals import Interrupted
from rlstack.learning.learner import Learner
from rlstack.storage import checkpoint
from tests.programs.running import nothing_left, ppo, run

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(60, method="thread")


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
    with nothing_left(), pytest.raises(Interrupted):
        train.resume(tmp_path / "run", frames=100_000)
    assert checkpoint.paths(tmp_path / "run" / "checkpoints") == saved
