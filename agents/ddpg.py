"""Deep deterministic policy gradient, Lillicrap et al. (2016), https://arxiv.org/abs/1509.02971.

One critic and a policy that maximises its value, each with a slow target (algorithm 1). Deviations:
exploration by independent Gaussian or uniform noise instead of an Ornstein-Uhlenbeck process,
because later work found this noise equally good; n-step targets (the replay's ``unroll_length``);
one pass updates policy and critic from the same params; the action enters the critic at its first
layer. Noise is in units of half the action's range. A truncated episode is bootstrapped from its
true last observation.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack.agents.registry import register
from rlstack.families.off_policy import (
    DeterministicAgent,
    DeterministicConfig,
    DeterministicParams,
    behaviour_policy,
)
from rlstack.math.n_step import n_step
from rlstack.networks import deterministic_policy_and_critic
from rlstack.optimizers import Components, component_optimizer
from rlstack.stateful_params import evaluating, has_state, moved_towards, training, weight_gradients
from rlstack.types import Array, Batch, LearnerOutput, Logs, PRNGKey, PyTree


@dataclasses.dataclass(frozen=True)
class DDPGConfig(DeterministicConfig):
    """Hyperparameters of DDPG."""

    num_critics: int = 1
    """Number of critics. With several, the smallest of their values counts. The paper has one."""
    target_rate: float = 0.005
    """Fraction by which the targets move towards the params at each update (the paper's is
    0.001)."""


class DDPGLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_params: DeterministicParams
    rng_key: Any = ()  # the key for networks with state or dropout; for others nothing is drawn


@register(DDPGConfig, network=deterministic_policy_and_critic, policy=behaviour_policy)
class DDPG(DeterministicAgent):
    """The agent; construct it with `deterministic_policy_and_critic` networks."""

    cfg: DDPGConfig

    def __init__(self, cfg: DDPGConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        components: Components = {
            ("policy",): cfg.policy_optimizer,
            ("critics",): cfg.critics_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def initial_learner_state(
        self, rng_key: PRNGKey, params: DeterministicParams
    ) -> DDPGLearnerState:
        """Returns the optimizer's initial state, with the params as the target."""
        draws = has_state(self.network)
        return DDPGLearnerState(self._optimizer.init(params), params, rng_key if draws else ())

    def compute_gradients(
        self, params: DeterministicParams, learner_state: DDPGLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and ``|TD error|`` as priorities."""
        learned = training(learner_state.rng_key, params)

        def loss(params: DeterministicParams) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(params, learner_state.target_params, batch)

        grads, (logs, priorities) = weight_gradients(loss, learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, params: DeterministicParams, target_params: DeterministicParams, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of the critic's and the policy's loss, (logs, ``|TD errors|`` ``[B]``).

        Each loss changes only its own part of the params. Importance weights apply to the critic
        only.
        """
        losses, errors, values = self.critic_losses(params, target_params, batch)
        critic_loss = jnp.mean(batch.weights * losses)

        transition = n_step(batch.trajectory, self.cfg.discount)
        fixed = jax.lax.stop_gradient(evaluating(params.critics))
        action = self.policy_action(params.policy, transition.timestep)
        value = self.critic_values(fixed, transition.timestep, action).min(1)
        policy_loss = -jnp.where(transition.valid, value, 0.0).mean()
        loss = critic_loss + policy_loss
        logs: Logs = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "value": jnp.mean(values),
            "td_error": jnp.mean(errors),
        }
        return loss, (logs, errors)

    def critic_losses(
        self, params: DeterministicParams, target_params: DeterministicParams, batch: Batch
    ) -> tuple[Array, Array, Array]:
        """Returns what the critics learn.

        Returns:
          The squared TD errors, summed over critics, ``[B]``; the mean ``|TD errors|``, ``[B]``;
          and the values of the actions taken, ``[B, N]``.
        """
        transition = n_step(batch.trajectory, self.cfg.discount)
        end_action = self.policy_action(target_params.policy, transition.end)
        end_value = self.critic_values(target_params.critics, transition.end, end_action).min(1)
        target = jax.lax.stop_gradient(transition.reward + transition.discount * end_value)
        action = self.bounds.to_unit(transition.action)
        taken = self.critic_values(params.critics, transition.timestep, action)
        # An item that begins at the last step of an episode has no transition to learn from.
        td_errors = jnp.where(transition.valid[:, None], target[:, None] - taken, 0.0)
        return 0.5 * jnp.square(td_errors).sum(-1), jnp.abs(td_errors).mean(-1), taken

    def update_learner_state(
        self,
        params: DeterministicParams,
        learner_state: DDPGLearnerState,
        opt_state: optax.OptState,
    ) -> DDPGLearnerState:
        """Stores the optimizers' state, and updates the targets and the key."""
        target = moved_towards(params, learner_state.target_params, self.cfg.target_rate)
        rng_key = learner_state.rng_key
        if has_state(self.network):
            rng_key = jax.random.split(rng_key)[0]
        return DDPGLearnerState(opt_state, target, rng_key)
