"""Advantage-weighted actor-critic, Nair et al. (2020), https://arxiv.org/abs/2006.09359.

The critics are those of an off-policy actor-critic; the policy imitates the actions of the data,
weighted by exp(advantage / temperature) (equation 13), where the advantage compares the action with
one of the policy's own. The constants are those of the authors' program,
https://github.com/rail-berkeley/rlkit/blob/master/examples/awac/mujoco/awac1.py, which also makes
the weights of a batch sum to its size. A preset gives the layers and the decay of the policy's
weights.

Deviations: a continuous action's standard deviation depends on the state, begins at 1 and is at
most exp(2), where the program's has one number for each part of the action, begins at exp(-3) and
is at most 1; policy and critics are updated from the same params; n-step targets (the replay's
``unroll_length``); any number of critics; discrete actions too, whose state values are exact
expectations.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.distributions import Categorical
from rlstack.families.advantage_weighted import (
    AdvantageWeightedAgent,
    AdvantageWeightedConfig,
    AdvantageWeightedParams,
    imitator_and_critic,
)
from rlstack.families.off_policy import sampling_policy, squared_errors
from rlstack.math.n_step import n_step
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class AWACConfig(AdvantageWeightedConfig):
    """Hyperparameters of AWAC."""

    temperature: float = 2.0
    """Lambda: a large one imitates all actions alike, a small one the best actions only."""
    min_log_std: float = -6.0
    """Smallest log standard deviation of continuous actions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("temperature", self.temperature > 0, "positive")


@register(AWACConfig, network=imitator_and_critic, policy=sampling_policy, recorded="any")
class AWAC(AdvantageWeightedAgent):
    """The agent; construct it with `imitator_and_critic` networks."""

    cfg: AWACConfig

    def loss(
        self,
        rng_key: PRNGKey,
        params: AdvantageWeightedParams,
        target_critics: Params,
        batch: Batch,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of two losses, (logs, mean ``|TD errors|`` ``[B]``).

        Each of them changes only its own part of the params. Importance weights apply to the
        critics only.
        """
        now_key, end_key = jax.random.split(rng_key)
        fixed = jax.lax.stop_gradient(evaluating(params))
        transition = n_step(batch.trajectory, self.cfg.discount)
        valid, action = transition.valid, self.unit_action(transition.action)
        end_value = self.policy_value(end_key, fixed.policy, target_critics, transition.end)
        target = transition.reward + transition.discount * end_value
        taken = self.outputs_of(params.critics, transition.timestep, action)
        _, errors, _ = learned = squared_errors(target, taken, valid)
        q_loss = jnp.mean(batch.weights * learned.losses)

        value = self.policy_value(now_key, fixed.policy, fixed.critics, transition.timestep)
        known = self.outputs_of(fixed.critics, transition.timestep, action).min(1)
        advantage = jnp.where(valid, known - value, 0.0)
        score = jnp.where(valid, advantage / self.cfg.temperature, -jnp.inf)
        # An item of no transition has no weight, also if the batch has no other.
        worth = jnp.where(valid, jax.nn.softmax(jnp.where(valid.any(), score, 0.0)), 0.0)
        worth *= valid.sum()
        policy_loss = self.imitation_loss(params.policy, transition, worth)
        loss = q_loss + policy_loss
        return loss, (
            {
                "loss": loss,
                "critic_loss": q_loss,
                "policy_loss": policy_loss,
                "value": jnp.mean(taken),
                "td_error": jnp.mean(errors),
                "advantage": advantage.mean(),
                "largest_weight": worth.max(),
            },
            errors,
        )

    def policy_value(
        self, rng_key: PRNGKey, policy: Params, critics: Params, timestep: TimeStep
    ) -> Array:
        """Returns the smallest critic's value of the policy, ``[B]``.

        It is that of one drawn action for continuous actions, and exact for discrete ones.
        """
        distribution = self.distribution(policy, timestep)
        if isinstance(distribution, Categorical):
            values = self.critics.apply(None, critics, timestep, ())[0].min(1)
            return (distribution.probs() * values).sum(-1)
        action = jnp.clip(distribution.sample(rng_key), -1.0, 1.0)
        return self.critic_values(critics, timestep, action).min(1)
