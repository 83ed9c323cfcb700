"""IMPALA's actor-critic with V-trace, Espeholt et al. (2018), https://arxiv.org/abs/1802.01561.

Actors may act with older params than the learner's: V-trace (paper, section 4.1) corrects values
and policy gradients by truncated importance weights. The learner runs its network over each unroll
from the recurrent state that the actor stored at the unroll's first step (paper, section 3). The
paper's deep residual torso is an option of the network (``torso="impala"``).

Discrete, multi-discrete, masked, continuous and structured actions; feed-forward or recurrent
networks. Deviations from the paper: losses are means over transitions, not sums; the last action
and reward are not inputs of the network, unless the environment's observation contains them; a
truncated episode is bootstrapped from its true last observation, and LAST -> FIRST pairs of steps,
which are not transitions, are left out. Lambda (remark 2) is an option; its default is 1, as in the
paper's experiments.
"""

from __future__ import annotations

import dataclasses

from rlstack.agents.registry import register
from rlstack.families.policy_gradient import (
    PolicyGradientAgent,
    PolicyGradientConfig,
    actor_critic_loss,
)
from rlstack.math import returns
from rlstack.networks import actor_critic
from rlstack.types import Array, Batch, Logs, Params


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(PolicyGradientConfig):
    """Hyperparameters of IMPALA."""

    clip_rho: float = 1.0
    """Largest importance weight of a TD error (paper: rho-bar = 1, section 5.2.2)."""
    clip_c: float = 1.0
    """Largest importance weight of the trace (paper: c-bar = 1)."""
    clip_pg_rho: float = 1.0
    """Largest importance weight of the policy gradient (paper: rho-bar)."""
    vtrace_lambda: float = 1.0
    """Decay of the trace, a factor on c (paper, remark 2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("clip_rho", "clip_c", "clip_pg_rho"):
            self.require(field, getattr(self, field) > 0, "positive")
        self.require("clip_rho", self.clip_rho >= self.clip_c, f"at least clip_c ({self.clip_c})")
        self.require("vtrace_lambda", 0 <= self.vtrace_lambda <= 1, "in [0, 1]")


@register(ImpalaConfig, network=actor_critic, compares_with_acting=True)
class Impala(PolicyGradientAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with an actor-critic network."""

    cfg: ImpalaConfig
    reads_first_state = True

    def loss(self, params: Params, batch: Batch) -> tuple[Array, Logs]:
        """Returns the sum of the paper's three updates (section 4.2) as one loss, and logs."""
        unrolled = self.unrolled(params, batch.trajectory)
        targets, advantages = returns.vtrace(
            log_rhos=unrolled.log_rhos,
            rewards=unrolled.reward,
            discounts=unrolled.discount,
            values=unrolled.value,
            mask=unrolled.mask,
            clip_rho=self.cfg.clip_rho,
            clip_c=self.cfg.clip_c,
            clip_pg_rho=self.cfg.clip_pg_rho,
            vtrace_lambda=self.cfg.vtrace_lambda,
        )
        return actor_critic_loss(self.cfg, unrolled, advantages, targets)
