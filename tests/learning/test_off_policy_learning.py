"""Off-policy agents learn: a toy always, their presets' stated returns when slow tests run."""

import statistics

import pytest

from rlstack.agents.categorical_sac import CategoricalSACConfig
from rlstack.agents.crossq import CrossQConfig
from rlstack.agents.d4pg import D4PGConfig
from rlstack.agents.ddpg import DDPGConfig
from rlstack.agents.mpo import MPOConfig
from rlstack.agents.sac import SACConfig
from rlstack.agents.td3 import TD3Config
from rlstack.agents.tqc import TQCConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.presets import preset
from rlstack.replay import ReplayConfig
from tests.learning.test_learning import learned_return, returns_of_seeds, toy

FAST = OptimizerConfig(learning_rate=3e-3)


def learn_off_policy(name, agent, frames, sampler="uniform", unroll_length=1, **network):
    return learned_return(
        toy(
            name,
            agent,
            frames=frames,
            num_envs=8,
            network=NetworkConfig(**{"hidden_sizes": (32, 32), "activation": "relu", **network}),
            replay=ReplayConfig(
                sampler=sampler,
                batch_size=64,
                unroll_length=unroll_length,
                starts="not_last",
                max_size=10_000,
                min_size=500,
                samples_per_insert=32.0,
            ),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [SACConfig, pytest.param(TD3Config, marks=pytest.mark.chosen), DDPGConfig]
)
def test_a_point_goes_to_the_origin(config):
    agent = config(discount=0.9, random_frames=500, target_rate=0.02, optimizer=FAST)
    # A random policy stays about 0.8 from the origin: -16 in 20 steps; the optimum is about -4.
    assert learn_off_policy("PointMass", agent, frames=4_000) > -5.5


SHARED = {"discount": 0.9, "random_frames": 500, "optimizer": FAST}
RENORM = {"norm": "batch_renorm", "norm_place": "outer", "batch_norm_decay": 0.99}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "network"),
    [
        (CrossQConfig(**SHARED), {**RENORM, "renorm_after": 500}),
        (TQCConfig(**SHARED, target_rate=0.02, num_critics=2), {"num_atoms": 15}),
        (
            CategoricalSACConfig(**SHARED, target_rate=0.02, temperature=0.1),
            {"torso": "sphere", "hidden_sizes": (32,), "num_atoms": 31},
        ),
        (D4PGConfig(**SHARED, target_rate=0.02, max_value=0.0), {"num_atoms": 31}),
        (MPOConfig(**SHARED, epsilon_mean=0.02, epsilon_std=1e-3, temperature=1.0), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_variants_go_to_the_origin_too(agent, network):
    assert learn_off_policy("PointMass", agent, 4_000, **network) > -5.5


@pytest.mark.slow
@pytest.mark.chosen
def test_sac_learns_catch_from_prioritized_three_step_items():
    agent = SACConfig(
        discount=0.95, target_entropy=0.2, random_frames=500, target_rate=0.02, optimizer=FAST
    )
    found = learn_off_policy("Catch", agent, 10_000, sampler="prioritized", unroll_length=3)
    assert found > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "least"), [("pendulum-sac", -170), ("pendulum-td3", -170), ("pendulum-ddpg", -180)]
)
def test_pendulum_swings_up_within_20k_frames(name, least):
    assert preset(name).frames <= 20_000 and preset(name).evaluator.episodes >= 50
    assert statistics.median(returns_of_seeds(name)) >= least


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_discrete_sac_solves_cartpole_within_100k_frames():
    assert preset("cartpole-sac").frames <= 100_000
    assert statistics.median(returns_of_seeds("cartpole-sac")) >= 475


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_sac_runs_as_a_halfcheetah_within_300k_frames():
    assert preset("halfcheetah-sac").frames <= 300_000
    assert statistics.median(returns_of_seeds("halfcheetah-sac")) >= 4500
