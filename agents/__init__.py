"""Algorithms, one file each.

To add one: write ``agents/NAME.py`` and give it a line in `AGENTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from rlstack import exploration
from rlstack.agent import Agent
from rlstack.networks import Network, actor_critic, q_network


class Entry(NamedTuple):
    """What the programs need to know of an algorithm."""

    agent: type[Agent]
    # (obs_spec, action_spec, cfg=NetworkConfig) -> network, unless the user brings one
    network: Callable[..., Network]
    # (agent cfg, environments in all) -> the policy that explores
    policy: Callable[[Any, int], exploration.Policy]


def _dqn_policy(cfg: DQNConfig, num_envs: int) -> exploration.Policy:
    return exploration.EpsilonGreedy(
        exploration.Linear(
            cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_frames, num_envs=num_envs
        )
    )


def _ppo_policy(cfg: PPOConfig, num_envs: int) -> exploration.Policy:
    del cfg, num_envs
    return exploration.Sample()


AGENTS: dict[type, Entry] = {
    DQNConfig: Entry(DQN, q_network, _dqn_policy),
    PPOConfig: Entry(PPO, actor_critic, _ppo_policy),
}

AgentConfig = DQNConfig | PPOConfig
