"""Q-learning by quantile regression, Dabney et al. (2018a), https://arxiv.org/abs/1710.10044.

The network's output is the values of fixed quantiles of each action's return. The config can add
double learning (not in the paper), n-step targets, prioritized replay, duelling and noisy networks;
see `rlstack.families.q_learning`. Deviation: the Huber loss is divided by its kappa, as in the
authors' later paper (arXiv:1806.06923, equation 3); at the paper's kappa of 1 both are equal.
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
from rlstack.math.value_distributions import midpoints, quantile_huber_loss
from rlstack.networks import distributional_q_network
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class QRDQNConfig(QLearningConfig):
    """Hyperparameters of QR-DQN; the number of quantiles is the network's (``num_atoms``)."""

    huber_delta: float = 1.0
    """Error beyond which the loss is linear (kappa, the paper's 1). 0: it is linear everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "huber_delta")
        self.require_finite("huber_delta")


@register(QRDQNConfig, network=distributional_q_network, policy=behaviour_policy)
class QRDQN(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says.

    Its network returns the values at the quantiles of each action, ``[B, A, N]``.
    """

    cfg: QRDQNConfig
    averages = True

    def action_values(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns the means over the quantiles, ``[B, A]``."""
        return self.outputs(rng_key if noisy else None, params, timestep).mean(axis=-1)

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of quantile losses (the paper's algorithm 1).

        Returns:
          The loss, (logs, the absolute TD errors of the means as priorities ``[B]``).
        """
        online_key, end_key = jax.random.split(rng_key)
        transition = n_step(batch.trajectory, self.cfg.discount)
        outputs = self.outputs(online_key, params, transition.timestep)
        quantiles = of_actions(outputs, transition.action)

        target_key, choosing_key = jax.random.split(end_key)
        end_outputs = choosing = self.outputs(target_key, target_params, transition.end)
        if self.cfg.double:
            choosing = self.outputs(choosing_key, evaluating(params), transition.end)
        best = preferences(choosing.mean(axis=-1), transition.end).mode()
        end_quantiles = of_actions(end_outputs, best)
        targets = transition.reward[:, None] + transition.discount[:, None] * end_quantiles
        targets = jax.lax.stop_gradient(targets)

        fractions = midpoints(quantiles.shape[-1])
        losses = quantile_huber_loss(quantiles, fractions, targets, self.cfg.huber_delta)
        values = quantiles.mean(axis=-1)
        td_error = targets.mean(axis=-1) - values
        return td_loss(losses, jnp.abs(td_error), values, transition, batch.weights)
