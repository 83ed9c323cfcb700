"""REINFORCE, Williams (1992), https://doi.org/10.1007/BF00992696: policy gradient of whole returns.

The weight of a step's gradient is the discounted sum of the rewards that follow it until the end of
the episode, minus an optional baseline: the network's value of the step. Returns are never
estimated. If an unroll ends inside an episode, the returns of that episode's steps are unknown, so
these steps are left out of every mean. ``complete`` in the logs is the fraction of steps with a
known return. This favours steps near the end of their episode; the bias is small if unrolls (the
replay's ``unroll_length``) are longer than episodes. If an episode spans several unrolls, only its
steps in the last of them are learned from.

Discrete, multi-discrete, masked, continuous and structured actions; feed-forward or recurrent
networks. Older params chose the first action of each unroll, so each transition counts by the
probability of its action now over that in acting, at most 1.

Deviations from the paper: the policy gradient is not itself discounted by the step's
distance from the episode's start; for an episode truncated by a time limit, the value of its last
observation counts as its last reward (0 without a baseline); the entropy bonus and standardised
weights are common additions.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.families.policy_gradient import (
    PolicyGradientAgent,
    PolicyGradientConfig,
    actor_critic_loss,
    masked_mean,
    standardised,
    weighted_as_acted,
)
from rlstack.math import returns
from rlstack.networks import actor_critic
from rlstack.types import Array, Batch, Logs, Params


@dataclasses.dataclass(frozen=True)
class ReinforceConfig(PolicyGradientConfig):
    """Hyperparameters of REINFORCE."""

    baseline: bool = True
    """Whether to subtract the value head's estimate from returns. If not, the head is not
    trained."""
    normalise_advantages: bool = True
    """Whether to standardise a batch's returns, minus the baseline, to mean 0 and standard
    deviation 1."""


@register(ReinforceConfig, network=actor_critic, compares_with_acting=True)
class Reinforce(PolicyGradientAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with an actor-critic network."""

    cfg: ReinforceConfig
    reads_first_state = True

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Logs]:
        """Returns the loss of policy and baseline on a batch, and logs."""
        unrolled = self.unrolled(params, batch.trajectory)
        ends = jnp.asarray(batch.trajectory.timestep.last())[1:]
        complete = jax.lax.cummax(ends.astype(jnp.int32), axis=0, reverse=True) > 0
        share = masked_mean(complete, unrolled.mask)
        if not self.cfg.baseline:
            unrolled = unrolled._replace(value=jnp.zeros_like(unrolled.value))
        targets = returns.discounted_returns(
            rewards=unrolled.reward,
            discounts=unrolled.discount,
            values=unrolled.value,
            mask=unrolled.mask,
        )
        unrolled = unrolled._replace(mask=unrolled.mask & complete)
        advantages = targets - unrolled.value[:-1]
        if not self.cfg.baseline:
            targets = unrolled.value[:-1]  # no value is regressed on anything
        if self.cfg.normalise_advantages:
            advantages = standardised(advantages, unrolled.mask)
        weighted = weighted_as_acted(unrolled, advantages, targets)
        loss, logs = actor_critic_loss(self.cfg, unrolled, *weighted)
        if not self.cfg.baseline:
            del logs["explained_variance"]
        return loss, {**logs, "complete": share}
