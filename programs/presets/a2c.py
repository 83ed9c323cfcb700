"""Presets of A2C."""

from __future__ import annotations

from agents.a2c import A2CConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import on_policy, preset
from rlstack.families.normalised import NormalisationConfig
from rlstack.optimizers import OptimizerConfig


@preset
def cartpole_a2c(name: str) -> Experiment:
    """CartPole-v1 by short unrolls and RMSProp, as in Mnih et al. (2016) and Stable Baselines3."""
    optimizer = OptimizerConfig(name="rmsprop", learning_rate=7e-4)
    return on_policy(
        name,
        A2CConfig(entropy_cost=0.0, optimizer=optimizer),
        EnvConfig("CartPole-v1", num_envs=16),
        unroll_length=5,
        frames=500_000,
        # With values near 100 the value loss would dominate the clipped gradient norm.
        normalisation=NormalisationConfig(reward_scale=0.1),
    )
