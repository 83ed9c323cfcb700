"""Algorithms, one file each.

To add one: write ``agents/NAME.py`` and give it a line in `AGENTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agents import dqn, r2d2
from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from rlstack import exploration
from rlstack.agent import Agent
from rlstack.networks import Network, actor_critic, q_network


def _sample(cfg: Any, num_envs: int) -> exploration.Policy:
    del cfg, num_envs
    return exploration.Sample()


class Entry(NamedTuple):
    """What the programs need to know of an algorithm."""

    agent: type[Agent]
    # (obs_spec, action_spec, cfg=NetworkConfig) -> network, unless the user brings one
    network: Callable[..., Network]
    # (agent cfg, environments in all) -> the policy that explores
    policy: Callable[[Any, int], exploration.Policy] = _sample


AGENTS: dict[type, Entry] = {
    DQNConfig: Entry(DQN, q_network, dqn.behaviour_policy),
    PPOConfig: Entry(PPO, actor_critic),
    R2D2Config: Entry(R2D2, q_network, r2d2.behaviour_policy),
}

AgentConfig = DQNConfig | PPOConfig | R2D2Config
