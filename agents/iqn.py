"""Implicit quantile networks, Dabney et al. (2018b), https://arxiv.org/abs/1806.06923.

The network gives the value of each action's return at any quantile. The quantiles are random, drawn
from the rng_key. K quantiles are used to act and to choose actions; all rows of an acting batch
share them, so that a row's action does not depend on the other rows. N and N' quantiles per item
are used to learn. The config can add double learning (not in the paper), n-step targets,
prioritized replay, duelling and noisy networks; see `rlstack.families.q_learning`. Acting is
risk-neutral.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.families.q_learning import (
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
    preferences,
    td_loss,
)
from rlstack.math.n_step import n_step
from rlstack.math.value_distributions import quantile_huber_loss
from rlstack.networks import AtFractions, implicit_q_network
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class IQNConfig(QLearningConfig):
    """Hyperparameters of IQN."""

    num_acting_fractions: int = 32
    """Number of quantiles that are averaged to give an action's value (K, the paper's 32)."""
    num_fractions: int = 64
    """Number of quantiles learned for each item (N, the paper's 64)."""
    num_target_fractions: int = 64
    """Number of quantiles of each item's target (N', the paper's 64)."""
    huber_delta: float = 1.0
    """Error beyond which the loss is linear (kappa, the paper's 1). 0: it is linear everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "num_acting_fractions", "num_fractions", "num_target_fractions")
        self.require_at_least(0, "huber_delta")
        self.require_finite("huber_delta")


@register(IQNConfig, network=implicit_q_network, policy=behaviour_policy, older_runtime=False)
class IQN(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says.

    Its network maps `rlstack.networks.AtFractions`, not an observation, to values ``[B, A, N]``.
    """

    cfg: IQNConfig

    def action_values(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns the means over K quantiles, ``[B, A]``; all rows share the quantiles."""
        fractions_key, noise_key = jax.random.split(rng_key)
        num_rows, num_fractions = timestep.step_type.shape[0], self.cfg.num_acting_fractions
        fractions = jax.random.uniform(fractions_key, (num_fractions,))
        fractions = jnp.broadcast_to(fractions, (num_rows, num_fractions))
        quantiles = self.quantiles(noise_key if noisy else None, params, timestep, fractions)
        return quantiles.mean(axis=-1)

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of quantile losses.

        Returns:
          The loss, (logs, the absolute TD errors of the means as priorities ``[B]``).
        """
        cfg, (online_key, end_key) = self.cfg, jax.random.split(rng_key)
        transition = n_step(batch.trajectory, cfg.discount)
        outputs, fractions = self.drawn_quantiles(
            online_key, params, transition.timestep, cfg.num_fractions
        )
        quantiles = of_actions(outputs, transition.action)

        # The mean of K quantiles chooses the next action; N' other quantiles value it (equation 5).
        choosing_key, target_key = jax.random.split(end_key)
        choosing_params = evaluating(params) if cfg.double else target_params
        choosing = self.action_values(choosing_key, choosing_params, transition.end)
        best = preferences(choosing, transition.end).mode()
        end_outputs, _ = self.drawn_quantiles(
            target_key, target_params, transition.end, cfg.num_target_fractions
        )
        end_quantiles = of_actions(end_outputs, best)
        targets = transition.reward[:, None] + transition.discount[:, None] * end_quantiles
        targets = jax.lax.stop_gradient(targets)

        losses = quantile_huber_loss(quantiles, fractions, targets, cfg.huber_delta)
        values = quantiles.mean(axis=-1)
        td_error = targets.mean(axis=-1) - values
        return td_loss(losses, jnp.abs(td_error), values, transition, batch.weights)

    def network_input(self, timestep: TimeStep) -> TimeStep:
        """Returns the steps with a fraction of 0, which does not matter to the torso's state."""
        fractions = jnp.zeros((*timestep.step_type.shape, 1))
        return timestep._replace(observation=AtFractions(timestep.observation, fractions))

    def drawn_quantiles(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, num_fractions: int
    ) -> tuple[Array, Array]:
        """Draws fractions ``[B, N]``; returns their values ``[B, A, N]``, and the fractions."""
        fractions_key, noise_key = jax.random.split(rng_key)
        fractions = jax.random.uniform(fractions_key, (timestep.step_type.shape[0], num_fractions))
        return self.quantiles(noise_key, params, timestep, fractions), fractions

    def quantiles(
        self, rng_key: PRNGKey | None, params: Params, timestep: TimeStep, fractions: Array
    ) -> Array:
        """Returns values ``[B, A, N]`` at fractions ``[B, N]``; no noise without a key."""
        asked = timestep._replace(observation=AtFractions(timestep.observation, fractions))
        return self.outputs(rng_key, params, asked)
