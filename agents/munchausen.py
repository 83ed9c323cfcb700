"""Munchausen DQN, Vieillard et al. (2020), https://arxiv.org/abs/2007.14430.

Soft Q-learning whose reward is helped by the scaled log-policy of the action taken (paper, equation
2): target = r + alpha [tau log pi(a|s)] clipped to [l0, 0] + discount * sum_a' pi (q - tau log pi),
where pi is the softmax of the target network's values over tau. As in the paper the target network
alone makes the target, so `double` has no part in it. With n-step items only the first reward is
helped.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from agents.registry import register
from rlstack import distributions
from rlstack.families.q_learning import (
    ItemLosses,
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
)
from rlstack.math.n_step import NStep
from rlstack.networks import q_network
from rlstack.networks.torsos import action_mask
from rlstack.types import Array, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class MunchausenConfig(QLearningConfig):
    """Hyperparameters of Munchausen DQN, with the paper's values."""

    temperature: float = 0.03
    """Tau: how soft the policy is, in units of value."""
    bonus: float = 0.9
    """Alpha: the share of the scaled log-policy that is added to the reward."""
    bonus_clip: float = -1.0
    """l0: the scaled log-policy is at least this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("temperature", self.temperature > 0, "positive")
        self.require("bonus", 0 <= self.bonus <= 1, "in [0, 1]")
        self.require("bonus_clip", self.bonus_clip <= 0, "at most 0")


@register(MunchausenConfig, network=q_network, policy=behaviour_policy)
class Munchausen(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: MunchausenConfig

    def values(self, outputs: Array) -> Array:
        """The network says values, ``[B, A]``."""
        return outputs

    def item_losses(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> ItemLosses:
        """Returns the Huber losses of the TD errors; priorities are their absolute values."""
        online_key, target_key = jax.random.split(rng_key)
        values = self.outputs(online_key, params, transition.timestep)
        chosen = of_actions(values, transition.action)
        td_error = self.targets(target_key, target_params, transition) - chosen
        return ItemLosses(optax.losses.huber_loss(td_error), jnp.abs(td_error), chosen)

    def targets(self, rng_key: PRNGKey, target_params: Params, transition: NStep) -> Array:
        """Returns the target of each item's first action, ``[B]``."""
        cfg = self.cfg
        begin_key, end_key = jax.random.split(rng_key)
        begin = self._policy(begin_key, target_params, transition.timestep)
        log_policy = cfg.temperature * begin.log_prob(transition.action)
        bonus = cfg.bonus * jnp.clip(log_policy, cfg.bonus_clip, 0.0)
        end = self._policy(end_key, target_params, transition.end)
        # The mean of q - tau log pi under pi is tau times the logsumexp of q / tau.
        soft_value = cfg.temperature * jax.nn.logsumexp(end.logits, axis=-1)
        target = transition.reward + bonus + transition.discount * soft_value
        return jax.lax.stop_gradient(target)

    def _policy(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep
    ) -> distributions.Categorical:
        values = self.outputs(rng_key, params, timestep)
        mask = action_mask(timestep.observation)
        return distributions.categorical(values / self.cfg.temperature, mask)
