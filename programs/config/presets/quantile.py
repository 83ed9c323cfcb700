"""Presets of QR-DQN and IQN."""

from __future__ import annotations

import dataclasses

from rlstack.agents.iqn import IQNConfig
from rlstack.agents.qr_dqn import QRDQNConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets.registry import falling, find, like, preset


@preset
def cartpole_qrdqn(name: str) -> Experiment:
    """CartPole-v1 by quantile regression; otherwise the constants of cartpole-dqn."""
    agent = QRDQNConfig(
        double=False,
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 15_000),
    )
    network = dataclasses.replace(find("cartpole-dqn").network, num_atoms=51)
    return like("cartpole-dqn", name, agent=agent, network=network, frames=60_000)


@preset
def cartpole_iqn(name: str) -> Experiment:
    """CartPole-v1 by implicit quantiles, 8 at a time; otherwise the constants of cartpole-dqn."""
    agent = IQNConfig(
        num_acting_fractions=8,
        num_fractions=8,
        num_target_fractions=8,
        double=False,
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 30_000),
    )
    replay = dataclasses.replace(
        find("cartpole-dqn").replay, batch_size=32, samples_per_insert=16.0
    )
    return like("cartpole-dqn", name, agent=agent, replay=replay, frames=60_000)
