"""C51, Rainbow, QR-DQN, IQN, DQN and PQN reach the returns that their presets state."""

import numpy as np
import pytest

from rlstack.agents.c51 import C51Config
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.presets import preset
from tests.learning.test_learning import PRIORITIZED, learned_return, returns_of_seeds, toy


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120)
def test_rainbow_learns_catch_with_no_epsilon():
    experiment = toy(
        "Catch",
        C51Config(
            min_value=-1.0,
            max_value=1.0,
            target_period=100,
            epsilon_start=0.0,
            epsilon_end=0.0,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        frames=9_000,
        num_envs=8,
        network=NetworkConfig(activation="relu", duelling=True, noisy_sigma=0.5, num_atoms=21),
        replay=PRIORITIZED,
    )
    # A random policy scores -0.6.
    assert learned_return(experiment) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["c51", "rainbow", "qrdqn", "iqn"])
def test_cartpole_is_solved_within_100k_frames(name):
    found = returns_of_seeds(f"cartpole-{name}")
    assert preset(f"cartpole-{name}").frames <= 100_000
    assert np.median(found) >= 475


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pqn_solves_cartpole():
    assert min(returns_of_seeds("cartpole-pqn")) >= 475


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_dqn_solves_acrobot_within_100k_frames():
    found = returns_of_seeds("acrobot-dqn")
    assert preset("acrobot-dqn").frames <= 100_000
    assert preset("acrobot-dqn").evaluator.episodes == 100
    assert np.median(found) >= -92
