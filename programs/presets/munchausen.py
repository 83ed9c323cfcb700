"""Presets of Munchausen DQN."""

from __future__ import annotations

from agents.munchausen import MunchausenConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import preset, uniform_transitions
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig


@preset
def cartpole_munchausen(name: str) -> Experiment:
    """CartPole-v1 by soft Q-learning with the log-policy added to the reward."""
    return Experiment(
        preset=name,
        agent=MunchausenConfig(
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
