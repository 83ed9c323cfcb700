"""Soft Q imitation learning, Reddy et al. (2019), https://arxiv.org/abs/1905.11108.

SAC that never sees the environment's rewards: the reward of a step is 1 in the demonstrations
(``replay.demonstrations``) and 0 in the agent's own experience, of which a batch has as many
(algorithm 1). Deviations: the critics, policy and temperature are those of SAC, where the paper's
program for discrete actions has soft Q-learning alone; the end of an episode is worth 0, as in the
paper, so give it where demonstrations and own episodes end alike.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.agents.sac import SAC, SACConfig, SACParams
from rlstack.families.demonstrated import is_demonstrated
from rlstack.families.off_policy import sampling_policy
from rlstack.networks import policy_and_critic
from rlstack.types import Array, Batch, Logs, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class SQILConfig(SACConfig):
    """Hyperparameters of SQIL: those of SAC, and the reward."""

    demonstration_reward: float = 1.0
    """Reward of each step of the demonstrations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("demonstration_reward", self.demonstration_reward > 0, "positive")


@register(SQILConfig, network=policy_and_critic, policy=sampling_policy, recorded="demonstrations")
class SQIL(SAC):
    """The agent; construct it as `rlstack.agent.Agent` says, with `policy_and_critic` networks."""

    cfg: SQILConfig
    reads_rewards = False

    def loss(
        self,
        rng_key: PRNGKey,
        params: SACParams,
        target_critics: Params,
        batch: Batch,
        moves: Array | None = None,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss of SAC for these rewards, (logs, mean |TD errors| [B])."""
        timestep = batch.trajectory.timestep
        reward = self.cfg.demonstration_reward * is_demonstrated(batch).astype(jnp.float32)
        timestep = timestep._replace(reward=jnp.where(timestep.first(), 0.0, reward))
        batch = batch._replace(trajectory=batch.trajectory._replace(timestep=timestep))
        return super().loss(rng_key, params, target_critics, batch, moves)
