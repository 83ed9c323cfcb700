"""Deep Q-learning, Mnih et al. (2015), https://doi.org/10.1038/nature14236, with its refinements.

By config: double Q-learning, n-step targets, prioritized replay, duelling and noisy networks, as
`rlstack.families.q_learning` says.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from agents.registry import register
from rlstack.families.q_learning import (
    ItemLosses,
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
)
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import q_network
from rlstack.types import Array, Params, PRNGKey, Trajectory


@dataclasses.dataclass(frozen=True)
class DQNConfig(QLearningConfig):
    """Hyperparameters of DQN."""

    huber_delta: float = 1.0
    """TD error beyond which the loss is linear; 0 squares all errors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "huber_delta")


@register(DQNConfig, network=q_network, policy=behaviour_policy)
class DQN(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: DQNConfig

    def values(self, outputs: Array) -> Array:
        """The network says values, ``[B, A]``."""
        return outputs

    def item_losses(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> ItemLosses:
        """Returns the Huber losses of the TD errors; priorities are their absolute values."""
        online_key, target_key = jax.random.split(rng_key)
        chosen = of_actions(
            self.outputs(online_key, params, transition.timestep), transition.action
        )
        td_error = self._targets(target_key, params, target_params, transition) - chosen
        if self.cfg.huber_delta:
            losses = optax.losses.huber_loss(td_error, delta=self.cfg.huber_delta)
        else:
            losses = 0.5 * td_error**2
        return ItemLosses(losses, jnp.abs(td_error), chosen)

    def targets(
        self, rng_key: PRNGKey, params: Params, target_params: Params, trajectory: Trajectory
    ) -> Array:
        """Returns the n-step target of each item's first action, ``[B]``."""
        transition = n_step(trajectory, self.cfg.discount)
        return self._targets(rng_key, params, target_params, transition)

    def _targets(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> Array:
        value = self.bootstrap(rng_key, params, target_params, transition.end)
        return transition.reward + transition.discount * value
