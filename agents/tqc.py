"""Truncated quantile critics, Kuznetsov et al. (2020), https://arxiv.org/abs/2005.04269.

SAC whose critics' outputs are values at quantiles of the return (``num_atoms``; the paper's 25).
The target is made of the quantiles of all critics together, sorted, without the largest ones, which
controls how much values are overestimated. The policy maximises the mean of all quantiles.
Deviations: those of SAC; the loss is a mean over critics and quantiles, as in the authors' program.
For one continuous action.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.agents.sac import SAC, SACConfig, SACParams
from rlstack.families.off_policy import CriticLosses, sampling_policy
from rlstack.math.n_step import NStep
from rlstack.math.value_distributions import midpoints, quantile_huber_loss
from rlstack.networks import policy_and_distributional_critic
from rlstack.types import Array, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class TQCConfig(SACConfig):
    """Hyperparameters of TQC, with the paper's values."""

    num_critics: int = 5
    """Number of critics."""
    dropped_quantiles: int = 2
    """Number of the largest quantiles that targets leave out, for each critic (the paper's 2, and 5
    for Hopper)."""
    huber_delta: float = 1.0
    """Error beyond which the loss is linear."""
    policy_value: Literal["min", "mean"] = "mean"
    """What the policy maximises: the smallest mean of a critic, or the mean of all (the paper)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "dropped_quantiles", "huber_delta")
        self.require_plain_targets("targets are made of the quantiles of all critics")


@register(TQCConfig, network=policy_and_distributional_critic, policy=sampling_policy)
class TQC(SAC):
    """The agent; construct it with `policy_and_distributional_critic` networks."""

    cfg: TQCConfig

    def __init__(self, cfg: TQCConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        distributions.bounds_of(self.action_spec, "TQC")

    def means(self, outputs: Array) -> Array:
        """Returns the means over quantiles ``[..., M]``, ``[...]``."""
        return outputs.mean(-1)

    def critic_losses(
        self,
        rng_key: PRNGKey,
        critics: Params,
        fixed: SACParams,
        target_critics: Params,
        transition: NStep,
    ) -> CriticLosses:
        """Returns the quantile losses with truncated targets (equations 10 to 12 of the paper).

        Raises:
          ValueError: no quantile is left.
        """
        distribution = self.policy_distribution(fixed.policy, transition.end)
        action, log_prob = distribution.sample_and_log_prob(rng_key)
        pooled = self.critic_outputs(target_critics, transition.end, action)  # [B, N, M]
        batch_size, num_critics, num_quantiles = pooled.shape
        left = num_quantiles - self.cfg.dropped_quantiles
        if left < 1:
            raise ValueError(
                "TQC: dropped_quantiles must be less than the network's num_atoms, "
                f"{num_quantiles}; got {self.cfg.dropped_quantiles}."
            )
        lowest = jnp.sort(pooled.reshape((batch_size, -1)))[:, : num_critics * left]
        soft = lowest - (self.entropy_weight(fixed) * log_prob)[:, None]
        target = transition.reward[:, None] + transition.discount[:, None] * soft  # [B, N left]

        taken = self.outputs_taken(critics, transition)  # [B, N, M]
        losses = quantile_huber_loss(
            taken, midpoints(num_quantiles), target[:, None], self.cfg.huber_delta
        ).mean(-1)
        values = self.means(taken)
        errors = jnp.abs(jax.lax.stop_gradient(target.mean(-1))[:, None] - values).mean(-1)
        losses = jnp.where(transition.valid, losses / num_quantiles, 0.0)
        return CriticLosses(losses, jnp.where(transition.valid, errors, 0.0), values)
