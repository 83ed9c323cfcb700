"""Dropout and batch norm: PPO and DQN solve CartPole with the constants of their presets."""

import dataclasses

import numpy as np
import pytest

from rlstack.programs.config.presets import preset
from tests.learning.test_learning import SEEDS, learned_return

NETWORKS = {
    # With a smaller decay the statistics move fast, and some seeds lose a good policy.
    "ppo": [{"dropout": 0.1}, {"norm": "batch_renorm", "batch_norm_decay": 0.9999}],
    "dqn": [{"dropout": 0.1}, {"norm": "batch_renorm"}, {"norm": "batch"}],
}


def return_of(agent, seed, options):
    experiment = preset(f"cartpole-{agent}")
    network = dataclasses.replace(experiment.network, **options)
    return learned_return(dataclasses.replace(experiment, seed=seed, network=network))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_ppo_solves_cartpole_with_dropout():
    assert return_of("ppo", 1, {"dropout": 0.1}) >= 475


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("agent", "options"),
    [(agent, options) for agent, several in NETWORKS.items() for options in several],
    ids=str,
)
def test_cartpole_is_solved_by_networks_with_dropout_or_batch_norm(agent, options):
    found = [return_of(agent, seed, options) for seed in SEEDS]
    print(f"{agent} {options}: {found}")
    assert np.median(found) >= 475
