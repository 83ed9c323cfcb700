"""Deep Q-learning, Mnih et al. (2015), https://doi.org/10.1038/nature14236, with its refinements.

The config can add double Q-learning, n-step targets, prioritized replay, duelling and noisy
networks; see `rlstack.families.q_learning`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from rlstack.agents.registry import register
from rlstack.families.q_learning import (
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
    preferences,
    td_loss,
)
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import q_network
from rlstack.optimizers import OptimizerConfig
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class DQNConfig(QLearningConfig):
    """Hyperparameters of DQN."""

    huber_delta: float = 1.0
    """TD error beyond which the loss is linear. 0: the loss is quadratic everywhere."""
    optimizer: OptimizerConfig = OptimizerConfig(eps=1e-8)
    """Optimizer of all components without their own optimizer; eps is usual for DQN with Adam."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "huber_delta")
        self.require_finite("huber_delta")


@register(DQNConfig, network=q_network, policy=behaviour_policy)
class DQN(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says, with a network of action values."""

    cfg: DQNConfig
    averages = True

    def action_values(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns the network's output, ``[B, A]``."""
        return self.outputs(rng_key if noisy else None, params, timestep)

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of Huber losses, (logs, ``|TD errors|`` ``[B]``)."""
        online_key, target_key = jax.random.split(rng_key)
        transition = n_step(batch.trajectory, self.cfg.discount)
        values = self.outputs(online_key, params, transition.timestep)
        taken = of_actions(values, transition.action)
        td_error = self.targets(target_key, params, target_params, transition) - taken
        if self.cfg.huber_delta:
            losses = optax.losses.huber_loss(td_error, delta=self.cfg.huber_delta)
        else:
            losses = 0.5 * td_error**2
        return td_loss(losses, jnp.abs(td_error), taken, transition, batch.weights)

    def targets(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> Array:
        """Returns reward + discount * the target network's value of the best next action, ``[B]``.

        The online network chooses the best action with ``double``; otherwise the target network
        does.
        """
        target_key, choosing_key = jax.random.split(rng_key)
        end_values = choosing = self.outputs(target_key, target_params, transition.end)
        if self.cfg.double:
            choosing = self.outputs(choosing_key, evaluating(params), transition.end)
        best = preferences(choosing, transition.end).mode()
        end_value = of_actions(end_values, best)
        return jax.lax.stop_gradient(transition.reward + transition.discount * end_value)
