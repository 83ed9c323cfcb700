"""Q-learning by quantile regression, Dabney et al. (2018a), https://arxiv.org/abs/1710.10044.

The network's output is the values of fixed quantiles of each action's return. By config: double
learning (not in the paper), n-step targets, prioritized replay, duelling and noisy networks, as
`rlstack.families.q_learning` says. Deviation: the Huber loss is divided by its kappa, as the
authors do later (arXiv:1806.06923, equation 3); at the paper's kappa of 1 the two are one.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from agents.registry import register
from rlstack.families.q_learning import (
    ItemLosses,
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
)
from rlstack.math.n_step import NStep
from rlstack.math.value_distributions import midpoints, quantile_huber_loss
from rlstack.networks import distributional_q_network
from rlstack.types import Array, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class QRDQNConfig(QLearningConfig):
    """Hyperparameters of QR-DQN; the network says how many quantiles there are."""

    huber_delta: float = 1.0
    """Error beyond which the loss is linear (kappa, the paper's 1); 0 makes it so throughout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "huber_delta")


@register(QRDQNConfig, network=distributional_q_network, policy=behaviour_policy)
class QRDQN(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says.

    Its network gives values at the quantiles of each action, ``[B, A, N]``.
    """

    cfg: QRDQNConfig

    def values(self, outputs: Array) -> Array:
        """Returns the means over quantiles ``[..., N]``, ``[...]``."""
        return outputs.mean(axis=-1)

    def item_losses(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> ItemLosses:
        """Returns quantile losses; priorities are the absolute TD errors of the means."""
        online_key, target_key = jax.random.split(rng_key)
        outputs = self.outputs(online_key, params, transition.timestep)
        quantiles = of_actions(outputs, transition.action)
        after = self.bootstrap(target_key, params, target_params, transition.end)
        targets = transition.reward[:, None] + transition.discount[:, None] * after
        fractions = midpoints(quantiles.shape[-1])
        losses = quantile_huber_loss(quantiles, fractions, targets, self.cfg.huber_delta)
        values = quantiles.mean(axis=-1)
        return ItemLosses(losses, jnp.abs(targets.mean(axis=-1) - values), values)
