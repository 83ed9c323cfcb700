"""Proximal policy optimisation, Schulman et al. (2017), https://arxiv.org/abs/1707.06347.

Discrete, multi-discrete, masked, continuous and structured actions; feed-forward or recurrent
networks. Deviations from the paper are common practice (Huang et al. 2022, "The 37 implementation
details of PPO"): advantages are normalised by minibatch, gradients are clipped by global norm, and
the value loss is optionally clipped. Two more are specific to rlstack: a truncated episode is
bootstrapped from its true last observation, and LAST -> FIRST pairs of steps, which are not
transitions, are left out of every mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.families.epochs import EpochPolicyGradient, EpochRows, EpochsConfig
from rlstack.families.policy_gradient import (
    PolicyGradientState,
    kl_estimate,
    masked_mean,
    standardised,
)
from rlstack.networks import actor_critic
from rlstack.types import Array, Logs, Params, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class PPOConfig(EpochsConfig):
    """Hyperparameters of PPO."""

    clip_ratio: float = 0.2
    """The policy ratio is clipped to 1 plus or minus this (paper, equation 7)."""
    value_clip: float = 0.0
    """Largest change of a value from the acting network's value; 0 does not clip."""
    normalise_advantages: bool = True
    """Whether to standardise each minibatch's advantages to mean 0 and standard deviation 1."""
    advantage_epsilon: float = 1e-8
    """Added to the standard deviation that advantages are divided by. Advantages shrink as a policy
    becomes more certain, and the division undoes that. Raise this to the size of a return when the
    policy stops exploring too early in spite of the entropy bonus."""
    ratio: Literal["joint", "per_actor"] = "joint"
    """For actions of several numbers, such as one per actor. joint clips the ratio of the whole
    action, and every step has the same weight; per_actor clips the ratio of each number, and every
    number has the same weight."""
    target_kl: float = 0.0
    """Largest approximate KL divergence of a minibatch from the policy that acted. The epochs of an
    update end before the first minibatch above it. 0 never ends them. Try 0.01 to 0.05 when `kl`
    jumps."""
    entropy_anneal_steps: int = 0
    """Optimizer steps over which entropy_cost falls linearly to 0. 0 keeps it constant. It does not
    follow --frames either; without the bonus a longer run still learns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("clip_ratio", self.clip_ratio > 0, "positive")
        self.require("value_clip", self.value_clip >= 0, "at least 0")
        self.require("advantage_epsilon", self.advantage_epsilon > 0, "positive")
        self.require("target_kl", self.target_kl >= 0, "at least 0")
        self.require("entropy_anneal_steps", self.entropy_anneal_steps >= 0, "at least 0")


@register(PPOConfig, network=actor_critic, compares_with_acting=True)
class PPO(EpochPolicyGradient):
    """The agent; construct it as `rlstack.agent.Agent` says, with an actor-critic network."""

    cfg: PPOConfig
    reads_first_state = True

    def __init__(self, cfg: PPOConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.may_stop = cfg.target_kl > 0

    def stops_at(self, logs: Logs) -> Array:
        """Returns whether the policy has moved beyond ``target_kl``."""
        return logs["kl"] > self.cfg.target_kl

    def completed(
        self,
        params: Params,
        learner_state: PolicyGradientState,
        trajectory: Trajectory,
        rows: EpochRows,
    ) -> EpochRows:
        """Returns the rows, with the entropy cost of this update if it falls."""
        if not self.cfg.entropy_anneal_steps:
            return rows
        left = jnp.maximum(1 - learner_state.num_updates / self.cfg.entropy_anneal_steps, 0)
        cost = jnp.full(rows.mask.shape, self.cfg.entropy_cost * left)
        return rows._replace(entropy_cost=cost)

    def loss(self, params: Params, rows: EpochRows) -> tuple[Array, Logs]:
        """Returns the clipped surrogate plus value and entropy terms (paper, equation 9)."""
        cfg = self.cfg
        output, rows = self.outputs(params, rows)
        distribution = self.distribution(output, rows.timestep)

        advantage = rows.advantage
        if cfg.normalise_advantages:
            advantage = standardised(advantage, rows.mask, cfg.advantage_epsilon)
        entropy_cost: Array | float = cfg.entropy_cost
        if not isinstance(rows.entropy_cost, tuple):
            entropy_cost = rows.entropy_cost
        # One ratio per whole action, [N], or one per part of the action that has a choice, [N, K].
        if cfg.ratio == "joint":
            log_prob = distribution.log_prob(rows.output.action)
            parts = distributions.Parts(log_prob, distribution.entropy(), rows.mask)
        else:
            parts = distributions.parts(distribution, rows.output.action)
            parts = parts._replace(decides=parts.decides & rows.mask[..., None])
            advantage = advantage[..., None]
            if not isinstance(entropy_cost, int | float):
                entropy_cost = entropy_cost[..., None]

        log_ratio = parts.log_prob - rows.output.behaviour_log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - cfg.clip_ratio, 1 + cfg.clip_ratio)
        surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
        policy_loss = -masked_mean(surrogate, parts.decides)

        value_error = (output.value - rows.target) ** 2
        if cfg.value_clip:
            move = jnp.clip(output.value - rows.output.value, -cfg.value_clip, cfg.value_clip)
            clipped_error = (rows.output.value + move - rows.target) ** 2
            value_error = jnp.maximum(value_error, clipped_error)
        value_loss = 0.5 * masked_mean(value_error, rows.mask)

        entropy_bonus = masked_mean(entropy_cost * parts.entropy, parts.decides)
        loss = policy_loss + cfg.value_cost * value_loss - entropy_bonus
        is_clipped = jnp.abs(ratio - 1) > cfg.clip_ratio
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": masked_mean(parts.entropy, parts.decides),
            "kl": kl_estimate(log_ratio, parts.decides),
            "clip_fraction": masked_mean(is_clipped, parts.decides),
        }

    def log_prob(self, distribution: distributions.Distribution, action: PyTree) -> Array:
        """Returns the log probability ``[B]``, or with a ratio per actor its parts ``[B, K]``."""
        if self.cfg.ratio == "joint":
            return super().log_prob(distribution, action)
        return distributions.parts(distribution, action).log_prob
