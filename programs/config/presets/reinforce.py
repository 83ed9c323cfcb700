"""Presets of REINFORCE."""

from __future__ import annotations

from rlstack.agents.reinforce import ReinforceConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset


@preset
def cartpole_reinforce(name: str) -> Experiment:
    """CartPole-v1 by whole returns, from unrolls that hold an episode; tuned here."""
    return on_policy(
        name,
        ReinforceConfig(entropy_cost=0.0, optimizer=OptimizerConfig(learning_rate=5e-3)),
        EnvConfig("CartPole-v1", num_envs=8),
        unroll_length=512,
        frames=500_000,
        # Values are then at most 1, and the baseline learns them quickly.
        normalisation=NormalisationConfig(reward_scale=0.01),
    )
