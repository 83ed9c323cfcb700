"""Synchronous advantage actor-critic (A2C), after Mnih et al. (2016), arXiv:1602.01783.

https://arxiv.org/abs/1602.01783, algorithm S3, with environments that step together instead of
asynchronous threads: one gradient step on each batch of new unrolls. The returns of an unroll
bootstrap from the value of its last step, so the replay's ``unroll_length`` is the paper's t_max.
``gae_lambda`` (Schulman et al. 2016, arXiv:1506.02438) mixes these returns with shorter ones; the
paper has no such mixture, which is ``gae_lambda`` 1.

Discrete, multi-discrete, masked, continuous and structured actions; feed-forward or recurrent
networks, run from the stored state of the unroll's first step. Deviations from the paper: losses
are means over transitions, not sums; a truncated episode is bootstrapped from its true last
observation, and LAST -> FIRST pairs of steps, which are not transitions, are left out.

A2C assumes on-policy data. Older params chose the first action of each unroll, so each transition
counts by the probability of its action now over that in acting, at most 1. This corrects single
actions. If actors run ahead of the learner by more, returns are of older policies: set the replay's
``max_staleness`` or use impala.
"""

from __future__ import annotations

import dataclasses

from rlstack.agents.registry import register
from rlstack.families.policy_gradient import (
    PolicyGradientAgent,
    PolicyGradientConfig,
    actor_critic_loss,
    standardised,
    weighted_as_acted,
)
from rlstack.math import returns
from rlstack.networks import actor_critic
from rlstack.types import Array, Batch, Logs, Params


@dataclasses.dataclass(frozen=True)
class A2CConfig(PolicyGradientConfig):
    """Hyperparameters of A2C."""

    gae_lambda: float = 1.0
    """Trace decay of the advantage estimator. The paper's value is 1."""
    normalise_advantages: bool = False
    """Whether to standardise a batch's advantages to mean 0 and standard deviation 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("gae_lambda", 0 <= self.gae_lambda <= 1, "in [0, 1]")


@register(A2CConfig, network=actor_critic, compares_with_acting=True)
class A2C(PolicyGradientAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with an actor-critic network."""

    cfg: A2CConfig
    reads_first_state = True

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Logs]:
        """Returns the loss of policy and value on a batch, and logs."""
        unrolled = self.unrolled(params, batch.trajectory)
        advantages, targets = returns.gae(
            rewards=unrolled.reward,
            discounts=unrolled.discount,
            values=unrolled.value,
            gae_lambda=self.cfg.gae_lambda,
            mask=unrolled.mask,
        )
        if self.cfg.normalise_advantages:
            advantages = standardised(advantages, unrolled.mask)
        weighted = weighted_as_acted(unrolled, advantages, targets)
        return actor_critic_loss(self.cfg, unrolled, *weighted)
