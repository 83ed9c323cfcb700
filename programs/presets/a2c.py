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
    frames, num_envs, unroll_length = 500_000, 16, 5
    return Experiment(
        preset=name,
        agent=A2CConfig(
            entropy_cost=0.0,
            optimizer=OptimizerConfig(
                name="rmsprop",
                learning_rate=7e-4,
                anneal_steps=frames // (num_envs * unroll_length),
            ),
        ),
        env=EnvConfig("CartPole-v1", num_envs=num_envs),
        replay=on_policy(num_envs, unroll_length),
        # Values near 100 would take gradient clipping for themselves.
        normalisation=NormalisationConfig(reward_scale=0.1),
        frames=frames,
    )
