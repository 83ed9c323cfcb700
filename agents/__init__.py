"""Algorithms, one file each.

To add one: write ``agents/NAME.py`` and give it a line in `AGENTS`.

Pure.

May import: rlstack, rlstack.distributions, rlstack.exploration, rlstack.families, rlstack.math,
rlstack.networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agents import r2d2, sac
from agents.a2c import A2C, A2CConfig
from agents.bc import BC, BCConfig
from agents.c51 import C51, C51Config
from agents.ddpg import DDPG, DDPGConfig
from agents.dqn import DQN, DQNConfig
from agents.fixed import Random, RandomConfig, Scripted, ScriptedConfig, no_network
from agents.impala import Impala, ImpalaConfig
from agents.iqn import IQN, IQNConfig
from agents.munchausen import Munchausen, MunchausenConfig
from agents.ppo import PPO, PPOConfig
from agents.qr_dqn import QRDQN, QRDQNConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.reinforce import Reinforce, ReinforceConfig
from agents.sac import SAC, SACConfig
from agents.td3 import TD3, TD3Config
from rlstack import exploration
from rlstack.agent import Agent
from rlstack.families import deterministic, q_learning
from rlstack.networks import (
    Network,
    PolicyAndCritic,
    actor_critic,
    deterministic_policy_and_critic,
    distributional_q_network,
    implicit_q_network,
    policy_and_critic,
    q_network,
)
from rlstack.networks.policy import policy_network


def _sample(cfg: Any, num_envs: int) -> exploration.Policy:
    del cfg, num_envs
    return exploration.Sample()


class Entry(NamedTuple):
    """What the programs need to know of an algorithm."""

    agent: type[Agent]
    # (obs_spec, action_spec, cfg=NetworkConfig) -> network, unless the user brings one
    network: Callable[..., Network | PolicyAndCritic]
    # (agent cfg, environments in all) -> the policy that explores
    policy: Callable[[Any, int], exploration.Policy] = _sample
    # whether it learns from recorded data alone, and never from its own acting
    offline: bool = False
    # whether XLA's older CPU runtime can compile its update (jaxlib 0.5's aborts on large products
    # whose operands come from random numbers)
    older_runtime: bool = True


AGENTS: dict[type, Entry] = {
    A2CConfig: Entry(A2C, actor_critic),
    BCConfig: Entry(BC, policy_network, offline=True),
    C51Config: Entry(C51, distributional_q_network, q_learning.behaviour_policy),
    DDPGConfig: Entry(DDPG, deterministic_policy_and_critic, deterministic.behaviour_policy),
    DQNConfig: Entry(DQN, q_network, q_learning.behaviour_policy),
    ImpalaConfig: Entry(Impala, actor_critic),
    IQNConfig: Entry(IQN, implicit_q_network, q_learning.behaviour_policy, older_runtime=False),
    MunchausenConfig: Entry(Munchausen, q_network, q_learning.behaviour_policy),
    PPOConfig: Entry(PPO, actor_critic),
    QRDQNConfig: Entry(QRDQN, distributional_q_network, q_learning.behaviour_policy),
    R2D2Config: Entry(R2D2, q_network, r2d2.behaviour_policy),
    RandomConfig: Entry(Random, no_network),
    ReinforceConfig: Entry(Reinforce, actor_critic),
    SACConfig: Entry(SAC, policy_and_critic, sac.behaviour_policy),
    ScriptedConfig: Entry(Scripted, no_network),
    TD3Config: Entry(TD3, deterministic_policy_and_critic, deterministic.behaviour_policy),
}

AgentConfig = (
    A2CConfig
    | BCConfig
    | C51Config
    | DDPGConfig
    | DQNConfig
    | ImpalaConfig
    | IQNConfig
    | MunchausenConfig
    | PPOConfig
    | QRDQNConfig
    | R2D2Config
    | RandomConfig
    | ReinforceConfig
    | SACConfig
    | ScriptedConfig
    | TD3Config
)
