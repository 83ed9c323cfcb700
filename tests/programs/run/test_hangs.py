"""Commands whose environment or hook hangs: they save, name it, and end; signals tell the truth."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlstack.storage import checkpoint

HERE = "tests.programs.run.test_hangs:"
pytestmark = pytest.mark.timeout(100)


class Hanging(gymnasium.Env):
    """Hangs in a step, in ``way``; episodes have 5 steps."""

    def __init__(self, way="none", at=30):
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._way, self._at, self._steps = way, at, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == self._at:
            hang(self._way)
        return np.zeros(2, np.float32), 1.0, self._steps % 5 == 0, False, {}


def hang(way):
    if way == "sleep":
        time.sleep(3600)
    elif way == "deadlock":  # in C, where no signal ends it
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)


class Processor:
    """A step processor that hangs in its 30th call."""

    def __init__(self, num_envs):
        self._calls = 0

    def __call__(self, step):
        self._calls += 1
        if self._calls == 30:
            time.sleep(3600)
        return step


def command(run_dir, *options):
    return [
        *(sys.executable, "-m", "rlstack", "train", "cartpole-a2c", "--run-dir", str(run_dir)),
        *("--env.name", f"{HERE}Hanging", "--env.type", "for_loop", "--env.num-envs", "2"),
        *("--frames", "1000000", *options),
    ]


def said_by(arguments, seconds_to_signal=None):
    """Runs a command; returns its exit code and what it said."""
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        if seconds_to_signal is not None:
            time.sleep(seconds_to_signal)
            os.kill(process.pid, signal.SIGTERM)
        _, said = process.communicate(timeout=80)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--env.options", "way", "sleep"), "Env 0 (Hanging): a step must end within"),
        pytest.param(
            ("--env.options", "way", "deadlock"),
            "Env 0 (Hanging): a step must end within",
            marks=[pytest.mark.slow, pytest.mark.chosen],
        ),
        pytest.param(
            ("--step-processor", f"{HERE}Processor"),
            "the step processor {here}Processor: a call must end within",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--env.eval-options", "way", "sleep", "at", "3", "--frames", "400"),
            "Env 0 (Hanging): a step must end within",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_hangs_is_saved_and_ends(tmp_path, options, named):
    run_dir = tmp_path / "run"
    code, said = said_by(command(run_dir, "--env.step-timeout", "1", *options))
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if "must end within" in line]
    assert named.format(here=HERE) in line and f"{__file__}:" in line
    assert line.startswith("rlstack train: ")
    assert checkpoint.latest(run_dir / "checkpoints") is not None
    if "--frames" not in options:
        assert "The run is saved at frame" in said
        assert checkpoint.read_metadata(checkpoint.latest(run_dir / "checkpoints"))["env_frames"]


@pytest.mark.slow
@pytest.mark.chosen
def test_a_signal_during_a_hang_says_what_is_awaited(tmp_path):
    options = ("--env.step-timeout", "22", "--env.options", "way", "sleep", "at", "400")
    code, said = said_by(command(tmp_path / "run", *options), seconds_to_signal=12)
    assert code == 1, said
    (told,) = [line for line in said.splitlines() if "SIGTERM was received" in line]
    assert "Env 0 (Hanging): a step, which may take step_timeout=22 s, ends" in told
    assert f"{__file__}:" in told
    assert "The run is saved at frame" in said
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is not None
