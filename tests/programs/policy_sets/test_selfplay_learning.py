"""Self-play ends near a mixed equilibrium."""

import io

import numpy as np
import pytest

import rlstack
from programs.presets import preset
from programs.run import train
from rlstack.envs.seats.rock_paper_scissors import exploitability


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rock_paper_scissors_ends_near_its_equilibrium(tmp_path):
    train.run(preset("rock-paper-scissors-selfplay"), tmp_path / "run", stream=io.StringIO())
    policy = rlstack.load(tmp_path / "run", policy="learner")
    probabilities = policy.predict(np.ones(1, np.float32)).probabilities["action"].ravel()
    assert exploitability(probabilities, rock=2.0) <= 0.12  # 0.33 for a third each
