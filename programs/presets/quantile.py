"""Presets of QR-DQN and IQN."""

from __future__ import annotations

from agents.iqn import IQNConfig
from agents.qr_dqn import QRDQNConfig
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import preset, uniform_transitions
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig


@preset
def cartpole_qrdqn(name: str) -> Experiment:
    """CartPole-v1 by quantile regression; else the constants of cartpole-dqn."""
    return Experiment(
        preset=name,
        agent=QRDQNConfig(
            double=False,
            target_rate=0.005,
            epsilon_frames=16_000,
            epsilon_end=0.04,
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=15_000),
        ),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu", num_atoms=51),
        replay=uniform_transitions(),
        frames=60_000,
    )


@preset
def cartpole_iqn(name: str) -> Experiment:
    """CartPole-v1 by implicit quantiles, 8 at a time; else the constants of cartpole-dqn."""
    return Experiment(
        preset=name,
        agent=IQNConfig(
            num_acting_fractions=8,
            num_fractions=8,
            num_target_fractions=8,
            double=False,
            target_rate=0.005,
            epsilon_frames=16_000,
            epsilon_end=0.04,
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=30_000),
        ),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu"),
        replay=uniform_transitions(batch_size=32, samples_per_insert=16.0),
        frames=60_000,
    )
