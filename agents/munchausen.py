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

from rlstack.agents.registry import register
from rlstack.families.q_learning import (
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
    preferences,
    td_loss,
)
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import q_network
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


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
        self.require("double", self.double, "left out: the policy's own values make the target")
        self.require("temperature", self.temperature > 0, "positive")
        self.require("bonus", 0 <= self.bonus <= 1, "in [0, 1]")
        self.require("bonus_clip", self.bonus_clip <= 0, "at most 0")


@register(MunchausenConfig, network=q_network, policy=behaviour_policy)
class Munchausen(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: MunchausenConfig
    averages = True

    def action_values(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns the network's output, ``[B, A]``."""
        return self.outputs(rng_key if noisy else None, params, timestep)

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of Huber losses, (logs, ``|TD errors|`` ``[B]``)."""
        online_key, target_key = jax.random.split(rng_key)
        transition = n_step(batch.trajectory, self.cfg.discount)
        values = self.outputs(online_key, params, transition.timestep)
        taken = of_actions(values, transition.action)
        td_error = self.targets(target_key, target_params, transition) - taken
        losses = optax.losses.huber_loss(td_error)
        return td_loss(losses, jnp.abs(td_error), taken, transition, batch.weights)

    def targets(self, rng_key: PRNGKey, target_params: Params, transition: NStep) -> Array:
        """Returns the target of each item's first action, ``[B]`` (paper, equation 2)."""
        cfg = self.cfg
        begin_key, end_key = jax.random.split(rng_key)
        begin_values = self.outputs(begin_key, target_params, transition.timestep)
        begin_policy = preferences(begin_values / cfg.temperature, transition.timestep)
        log_policy = cfg.temperature * begin_policy.log_prob(transition.action)
        bonus = cfg.bonus * jnp.clip(log_policy, cfg.bonus_clip, 0.0)

        end_values = self.outputs(end_key, target_params, transition.end)
        end_policy = preferences(end_values / cfg.temperature, transition.end)
        # The mean of q - tau log pi under pi is tau times the logsumexp of q / tau.
        soft_value = cfg.temperature * jax.nn.logsumexp(end_policy.logits, axis=-1)
        target = transition.reward + bonus + transition.discount * soft_value
        return jax.lax.stop_gradient(target)
