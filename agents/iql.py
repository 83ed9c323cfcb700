"""Implicit Q-learning, Kostrikov et al. (2021), https://arxiv.org/abs/2110.06169.

A state value is an upper expectile of the critics' values over the actions of the data (equation
5), the critics bootstrap from it (equation 6), and the policy imitates these actions, weighted by
exp(advantage) (equation 7). No part of it values an action that is not in the data. The constants
are those of the authors' program for MuJoCo,
https://github.com/ikostrikov/implicit_q_learning/blob/master/configs/mujoco_config.py, which also
bounds the weights and the standard deviation.

Deviations: value, critics and policy are updated from the same params, while the program updates
one after the other; n-step targets (the replay's ``unroll_length``); any number of critics;
discrete actions too; the learning rate of the policy falls only if its optimizer says so; rewards
are scaled by ``normalisation.reward_scale``, where the program divides them by the range of the
dataset's returns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from dm_env import specs

from rlstack.agents.registry import register
from rlstack.families.advantage_weighted import (
    AdvantageWeightedAgent,
    AdvantageWeightedConfig,
    AdvantageWeightedParams,
    AdvantageWeightedState,
    imitator_and_critic,
)
from rlstack.families.off_policy import sampling_policy, squared_errors
from rlstack.math.n_step import n_step
from rlstack.stateful_params import evaluating, training
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class IQLConfig(AdvantageWeightedConfig):
    """Hyperparameters of IQL."""

    expectile: float = 0.7
    """Which expectile of the critics' values the state value is: 0.5 is the mean, near 1 the
    largest value of an action in the data."""
    inverse_temperature: float = 3.0
    """Beta: 0 imitates all actions alike, a large one the best actions only."""
    max_weight: float = 100.0
    """Largest weight of an action."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("expectile", 0 < self.expectile < 1, "in (0, 1)")
        self.require_at_least(0, "inverse_temperature")
        self.require("max_weight", self.max_weight > 0, "positive")


@register(IQLConfig, network=imitator_and_critic, policy=sampling_policy, recorded="any")
class IQL(AdvantageWeightedAgent):
    """The agent; construct it with `imitator_and_critic` networks."""

    cfg: IQLConfig

    def __init__(self, cfg: IQLConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        # Its critic of a single choice is a state value.
        make_network = self._arguments[3]
        self._value = make_network(self.obs_spec, specs.DiscreteArray(1)).critic

    def initial_params(self, rng_key: PRNGKey) -> AdvantageWeightedParams:
        """Returns newly initialised params of the three networks."""
        params = super().initial_params(rng_key)
        return params._replace(state_value=self._value.init(jax.random.fold_in(rng_key, 2)))

    def update_network_state(
        self, params: AdvantageWeightedParams, learner_state: AdvantageWeightedState, batch: Batch
    ) -> AdvantageWeightedParams:
        """Returns the params with the networks' states after a pass over the items' first steps."""
        params = super().update_network_state(params, learner_state, batch)
        if self._value.new_state is None:
            return params
        learned = training(learner_state.rng_key, params)
        first = jax.tree.map(lambda x: x[:1], batch.trajectory.timestep)
        state = self._value.new_state(learned.state_value, first, ())
        return params._replace(state_value=params.state_value._replace(state=state))

    def state_values(self, value: Params, timestep: TimeStep) -> Array:
        """Returns the values of ``[B, ...]`` steps, ``[B]``."""
        return self._value.apply(None, value, timestep, ())[0][:, 0]

    def loss(
        self,
        rng_key: PRNGKey,
        params: AdvantageWeightedParams,
        target_critics: Params,
        batch: Batch,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of three losses, (logs, mean ``|TD errors|`` ``[B]``).

        Each of them changes only its own part of the params. Importance weights apply to the
        critics and the value.
        """
        del rng_key
        cfg, transition = self.cfg, n_step(batch.trajectory, self.cfg.discount)
        valid, action = transition.valid, self.unit_action(transition.action)
        targets = self.outputs_of(target_critics, transition.timestep, action).min(1)
        value = self.state_values(params.state_value, transition.timestep)
        advantage = jnp.where(valid, targets - value, 0.0)
        side = jnp.where(advantage > 0, cfg.expectile, 1.0 - cfg.expectile)
        value_loss = jnp.mean(batch.weights * side * jnp.square(advantage))

        end_value = self.state_values(evaluating(params.state_value), transition.end)
        target = transition.reward + transition.discount * end_value
        taken = self.outputs_of(params.critics, transition.timestep, action)
        _, errors, _ = learned = squared_errors(target, taken, valid)
        q_loss = jnp.mean(batch.weights * learned.losses)

        fixed = jax.lax.stop_gradient(advantage)
        worth = jnp.minimum(jnp.exp(cfg.inverse_temperature * fixed), cfg.max_weight)
        policy_loss = self.imitation_loss(params.policy, transition, worth)
        loss = value_loss + q_loss + policy_loss
        return loss, (
            {
                "loss": loss,
                "value_loss": value_loss,
                "critic_loss": q_loss,
                "policy_loss": policy_loss,
                "value": jnp.mean(taken),
                "td_error": jnp.mean(errors),
                "advantage": advantage.mean(),
                "weight": worth.mean(),
            },
            errors,
        )
