"""Presets of C51 alone; those with all its refinements are in rainbow.py."""

from __future__ import annotations

from agents.c51 import C51Config
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import preset, uniform_transitions
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig


@preset
def cartpole_c51(name: str) -> Experiment:
    """CartPole-v1 with distributions of returns; else the constants of cartpole-dqn."""
    return Experiment(
        preset=name,
        agent=C51Config(
            min_value=0.0,  # each step pays 1, so returns discounted by 0.99 lie in [0, 100]
            max_value=100.0,
            double=False,
            target_rate=0.005,
            epsilon_frames=16_000,
            epsilon_end=0.04,
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=25_000),
        ),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=uniform_transitions(),
        frames=100_000,
    )
