"""R2D2 learns tasks that need memory; Q-learning without memory does not."""

import dataclasses

import numpy as np
import pytest

from rlstack.programs.config.presets import preset
from tests.learning.test_learning import learned_return, returns_of_seeds


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_r2d2_remembers_a_cue():
    # A random policy, and the best policy without memory, score 0.
    assert learned_return(dataclasses.replace(preset("memorycue-r2d2"), frames=20_000)) > 0.95


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_r2d2_balances_a_pole_without_velocities_within_300k_frames():
    found = returns_of_seeds("memory-cartpole-r2d2")
    assert preset("memory-cartpole-r2d2").frames <= 300_000
    assert np.median(found) >= 400


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_memory_q_learning_does_not():
    """Uses the DQN that solves CartPole, in the same environments for the same number of frames."""
    without, with_memory = (preset(f"memory-cartpole-{name}") for name in ("dqn", "r2d2"))
    assert without.env.name == with_memory.env.name and without.frames == with_memory.frames
    assert np.median(returns_of_seeds("memory-cartpole-dqn")) < 200
