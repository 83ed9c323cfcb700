"""Presets of Munchausen DQN."""

from __future__ import annotations

from rlstack.agents.munchausen import MunchausenConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets.registry import falling, like, preset


@preset
def cartpole_munchausen(name: str) -> Experiment:
    """CartPole-v1 by soft Q-learning with the log-policy added to the reward."""
    agent = MunchausenConfig(
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 25_000),
    )
    return like("cartpole-dqn", name, agent=agent)
