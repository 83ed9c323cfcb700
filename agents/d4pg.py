"""Distributed distributional deterministic policy gradients, Barth-Maron et al. (2018).

https://arxiv.org/abs/1804.08617, algorithm 1: DDPG whose critic is a distribution over fixed atoms,
with n-step targets (the replay's ``unroll_length``; the paper's 5), prioritized replay by config,
and many actors (any topology with several). Deviations: those of DDPG; the targets move by a rate
and not every 100 updates; priorities are the divergences of the distributions.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.ddpg import DDPG, DDPGConfig
from rlstack.agents.registry import register
from rlstack.families.off_policy import (
    AtomsConfig,
    DeterministicParams,
    behaviour_policy,
    of_least,
)
from rlstack.math.n_step import n_step
from rlstack.math.value_distributions import categorical_kl, categorical_mean, project
from rlstack.networks import deterministic_policy_and_distributional_critic
from rlstack.optimizers import OptimizerConfig
from rlstack.types import Array, Batch


@dataclasses.dataclass(frozen=True)
class D4PGConfig(AtomsConfig, DDPGConfig):
    """Hyperparameters of D4PG; ``num_atoms`` is the network's (the paper's 51)."""

    noise_scale: float = 0.3
    """Standard deviation (gaussian) or largest value (uniform) of the noise, in half-ranges."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, eps=1e-8)
    """Optimizer of all components without their own optimizer (the paper's rate)."""


@register(
    D4PGConfig, network=deterministic_policy_and_distributional_critic, policy=behaviour_policy
)
class D4PG(DDPG):
    """The agent; construct it with `deterministic_policy_and_distributional_critic` networks."""

    cfg: D4PGConfig

    def means(self, outputs: Array) -> Array:
        """Returns the means of the distributions with logits ``[..., M]``, ``[...]``."""
        return categorical_mean(outputs, self.cfg.atoms(outputs))

    def critic_losses(
        self, params: DeterministicParams, target_params: DeterministicParams, batch: Batch
    ) -> tuple[Array, Array, Array]:
        """Returns the KL divergences from the projected targets to the predictions.

        Returns:
          Their sum over critics ``[B]``, the priorities ``[B]`` and the values ``[B, N]``.
        """
        transition = n_step(batch.trajectory, self.cfg.discount)
        end_action = self.policy_action(target_params.policy, transition.end)
        outputs = self.critic_outputs(target_params.critics, transition.end, end_action)
        probs = jax.nn.softmax(of_least(outputs, self.means(outputs)))
        atoms = self.cfg.atoms(probs)
        moved = transition.reward[:, None] + transition.discount[:, None] * atoms
        target = jax.lax.stop_gradient(project(moved, probs, atoms))
        action = self.bounds.to_unit(transition.action)
        taken = self.critic_outputs(params.critics, transition.timestep, action)
        losses = categorical_kl(target[:, None], taken)
        losses = jnp.where(transition.valid[:, None], losses, 0.0)
        # Where prediction and target agree, rounding can make a divergence negative.
        return losses.sum(-1), jnp.maximum(losses, 0.0).mean(-1), self.means(taken)
