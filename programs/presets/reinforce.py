"""Presets of REINFORCE."""

from __future__ import annotations

from agents.reinforce import ReinforceConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import on_policy, preset
from rlstack.families.normalised import NormalisationConfig
from rlstack.optimizers import OptimizerConfig


@preset
def cartpole_reinforce(name: str) -> Experiment:
    """CartPole-v1 by whole returns, from unrolls that an episode fits into; tuned here."""
    frames, num_envs, unroll_length = 500_000, 8, 512
    return Experiment(
        preset=name,
        agent=ReinforceConfig(
            entropy_cost=0.0,
            optimizer=OptimizerConfig(
                learning_rate=5e-3, anneal_steps=frames // (num_envs * unroll_length)
            ),
        ),
        env=EnvConfig("CartPole-v1", num_envs=num_envs),
        replay=on_policy(num_envs, unroll_length),
        # Values of at most 1, which the baseline learns soon.
        normalisation=NormalisationConfig(reward_scale=0.01),
        frames=frames,
    )
