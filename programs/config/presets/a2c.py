"""Presets of A2C."""

from __future__ import annotations

from rlstack.agents.a2c import A2CConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset


@preset
def cartpole_a2c(name: str) -> Experiment:
    """CartPole-v1 by short unrolls and RMSProp, as in Mnih et al. (2016) and Stable Baselines3.

    The constants are those of Stable Baselines3:
    https://github.com/DLR-RM/stable-baselines3/blob/master/stable_baselines3/a2c/a2c.py. Its value
    loss is not halved, so its weight of 0.5 is 1 here. Deviations: rewards are scaled by 0.1, the
    learning rate falls to 0, and RMSProp's eps is inside the square root.
    """
    optimizer = OptimizerConfig(name="rmsprop", learning_rate=7e-4, decay=0.99)
    return on_policy(
        name,
        A2CConfig(entropy_cost=0.0, value_cost=1.0, optimizer=optimizer),
        EnvConfig("CartPole-v1", num_envs=16),
        unroll_length=5,
        frames=500_000,
        # With values near 100 the value loss would dominate the clipped gradient norm.
        normalisation=NormalisationConfig(reward_scale=0.1),
    )
