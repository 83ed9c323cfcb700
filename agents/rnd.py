"""Random network distillation, Burda et al. (2019), https://arxiv.org/abs/1810.12894.

PPO and DQN with a bonus for new observations: `rlstack.families.intrinsic` says what it is, and
where it deviates. For another agent, register a class like those below. `bonus` chooses
the episodic bonus of Never Give Up (Badia et al. 2020, https://arxiv.org/abs/2002.06038), alone or
together with RND.

PPO has the two streams of the paper, with its weights 2 and 1 of their advantages (section 3.4 and
the authors' program). Deviation: advantages are standardised, as in `rlstack.agents.ppo`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstack.agent import Agent
from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.agents.registry import register
from rlstack.families.intrinsic import IntrinsicConfig, intrinsic
from rlstack.families.q_learning import behaviour_policy
from rlstack.networks import actor_critic, q_network


@dataclasses.dataclass(frozen=True)
class RNDConfig(IntrinsicConfig, PPOConfig):
    """Hyperparameters of PPO, and those of the bonus."""

    extrinsic_weight: float = 2.0
    """Factor on the advantage of the environment's rewards."""


@register(RNDConfig, network=actor_critic, compares_with_acting=True)
class RND(PPO):
    """Makes a PPO and puts it into the wrapper."""

    def __new__(cls, cfg: RNDConfig, *parts: Any) -> Agent:  # type: ignore[misc]
        """Returns the wrapped agent."""
        return intrinsic(PPO(cfg, *parts), cfg)


@dataclasses.dataclass(frozen=True)
class RNDDQNConfig(IntrinsicConfig, DQNConfig):
    """Hyperparameters of DQN, and those of the bonus."""


@register(RNDDQNConfig, network=q_network, policy=behaviour_policy)
class RNDDQN(DQN):
    """Makes a DQN and puts it into the wrapper."""

    def __new__(cls, cfg: RNDDQNConfig, *parts: Any) -> Agent:  # type: ignore[misc]
        """Returns the wrapped agent."""
        return intrinsic(DQN(cfg, *parts), cfg)
