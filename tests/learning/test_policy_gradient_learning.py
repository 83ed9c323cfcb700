"""IMPALA, A2C and REINFORCE learn: toys always, the presets' stated returns in slow tests."""

import numpy as np
import pytest

from rlstack.agents.a2c import A2CConfig
from rlstack.agents.impala import ImpalaConfig
from rlstack.agents.reinforce import ReinforceConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.presets import preset
from tests.learning.test_learning import learned_return, returns_of_seeds, toy

QUICK = OptimizerConfig(learning_rate=3e-3)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("agent", "unroll_length"),
    [
        (ImpalaConfig(entropy_cost=0.003, optimizer=QUICK), 8),
        (A2CConfig(entropy_cost=0.003, gae_lambda=0.95, optimizer=QUICK), 8),
        (ReinforceConfig(entropy_cost=0.003, optimizer=QUICK), 20),
    ],
    ids=["impala", "a2c", "reinforce"],
)
def test_catch_is_learned(agent, unroll_length):
    assert learned_return(toy("Catch", agent, frames=40_000, unroll_length=unroll_length)) > 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "worst"),
    [("cartpole-impala", 475), ("cartpole-a2c", 475), ("cartpole-reinforce", 400)],
)
def test_cartpole_is_solved_within_500k_frames(name, worst):
    found = returns_of_seeds(name)
    assert preset(name).frames <= 500_000
    assert np.median(found) >= 475
    assert min(found) >= worst


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_impala_with_a_memory_balances_what_it_does_not_see_move():
    name = "memory-cartpole-impala"
    assert preset(name).frames <= 300_000
    assert np.median(returns_of_seeds(name)) >= 400
    without = NetworkConfig(core="none", hidden_sizes=(64, 64))
    assert np.median(returns_of_seeds(name, network=without)) < 200
