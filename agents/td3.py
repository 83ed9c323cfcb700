"""Twin delayed deep deterministic policy gradient, Fujimoto et al. (2018).

https://arxiv.org/abs/1802.09477, algorithm 1: the target is the smaller value of two critics, at an
action of the target policy with clipped noise added; policy and targets are updated at every second
update of the critics. Deviations: any number of critics; n-step targets (the replay's
``unroll_length``); policy and critics are updated from the same params, so the policy maximises the
critic from before that update. All noise is in units of half the action's range. A truncated
episode is bootstrapped from its true last observation.
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
from rlstack.optimizers import component_optimizer, optimizer_step
from rlstack.stateful_params import (
    moved_towards,
    training,
    weight_gradients,
    weights_of,
    with_weights,
)
from rlstack.types import Array, Batch, LearnerOutput, Logs, Params, PRNGKey, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class TD3Config(DeterministicConfig):
    """Hyperparameters of TD3.

    The policy maximises the value of the first critic. Its optimizer counts the policy's updates
    only. The gradients of policy and critics are clipped separately.
    """

    policy_period: int = 2
    """Updates of the critics for each update of the policy and of the targets."""
    target_noise: float = 0.2
    """Standard deviation of the noise on the target policy's action, in half-ranges."""
    target_noise_clip: float = 0.5
    """Largest noise on the target policy's action, in half-ranges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "policy_period")
        self.require_at_least(0, "target_noise", "target_noise_clip")


class TD3OptState(NamedTuple):
    """The optimizers' states."""

    policy: optax.OptState
    critics: optax.OptState


class TD3LearnerState(NamedTuple):
    """The learner's state."""

    opt_state: TD3OptState
    target_params: DeterministicParams
    num_updates: Array  # [] int32
    rng_key: PRNGKey


@register(TD3Config, network=deterministic_policy_and_critic, policy=behaviour_policy)
class TD3(DeterministicAgent):
    """The agent; construct it with `deterministic_policy_and_critic` networks."""

    cfg: TD3Config

    def __init__(self, cfg: TD3Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        policy_optimizer = cfg.policy_optimizer or cfg.optimizer
        self._policy_optimizer = component_optimizer(policy_optimizer, {}, cfg.max_grad_norm)
        critics_optimizer = cfg.critics_optimizer or cfg.optimizer
        self._critic_optimizer = component_optimizer(critics_optimizer, {}, cfg.max_grad_norm)

    def initial_learner_state(
        self, rng_key: PRNGKey, params: DeterministicParams
    ) -> TD3LearnerState:
        """Returns the optimizers' initial states, with the params as the target."""
        opt_state = TD3OptState(
            self._policy_optimizer.init(params.policy), self._critic_optimizer.init(params.critics)
        )
        return TD3LearnerState(opt_state, params, jnp.zeros((), jnp.int32), rng_key)

    def compute_gradients(
        self, params: DeterministicParams, learner_state: TD3LearnerState, batch: Batch
    ) -> tuple[DeterministicParams, LearnerOutput]:
        """Returns gradients (0 for the policy between its updates), logs and priorities."""
        noise_key = jax.random.split(learner_state.rng_key)[1]
        learned, weights = training(learner_state.rng_key, params), weights_of(params)

        def critic_loss(critics: Params) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(noise_key, critics, learner_state.target_params, batch)

        def policy_loss(weights: PyTree) -> Array:
            return self.policy_loss(with_weights(learned.policy, weights), params.critics, batch)

        critic_grads, (logs, priorities) = weight_gradients(critic_loss, learned.critics)
        policy_grads = jax.lax.cond(
            self._moves_policy(learner_state),
            lambda: jax.grad(policy_loss)(weights.policy),
            lambda: jax.tree.map(jnp.zeros_like, weights.policy),
        )
        grads = DeterministicParams(policy_grads, critic_grads)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, rng_key: PRNGKey, critics: Params, target_params: DeterministicParams, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the critics' weighted loss, (logs, mean ``|TD errors|`` ``[B]``)."""
        transition = n_step(batch.trajectory, self.cfg.discount)
        end_action = self.smoothed_action(rng_key, target_params.policy, transition.end)
        end_value = self.critic_values(target_params.critics, transition.end, end_action).min(1)
        target = jax.lax.stop_gradient(transition.reward + transition.discount * end_value)

        action = self.bounds.to_unit(transition.action)
        taken = self.critic_values(critics, transition.timestep, action)
        # An item that begins at the last step of an episode has no transition to learn from.
        td_errors = jnp.where(transition.valid[:, None], target[:, None] - taken, 0.0)
        loss = jnp.mean(batch.weights * 0.5 * jnp.square(td_errors).sum(-1))
        errors = jnp.abs(td_errors).mean(-1)
        return loss, ({"loss": loss, "value": jnp.mean(taken), "td_error": errors.mean()}, errors)

    def smoothed_action(self, rng_key: PRNGKey, policy: Params, timestep: TimeStep) -> Array:
        """Returns the policy's action with clipped noise, in [-1, 1], ``[B, D]``."""
        action = self.policy_action(policy, timestep)
        noise = self.cfg.target_noise * jax.random.normal(rng_key, action.shape)
        noise = jnp.clip(noise, -self.cfg.target_noise_clip, self.cfg.target_noise_clip)
        return jnp.clip(action + noise, -1.0, 1.0)

    def policy_loss(self, policy: Params, critics: Params, batch: Batch) -> Array:
        """Returns minus the mean value, by the first critic, of the policy's actions."""
        timestep = jax.tree.map(lambda x: x[0], batch.trajectory.timestep)
        values = self.critic_values(critics, timestep, self.policy_action(policy, timestep))[:, 0]
        valid = ~jnp.asarray(batch.trajectory.timestep.first())[1]  # else it is no transition
        return -jnp.where(valid, values, 0.0).mean()

    def apply_gradients(
        self, params: DeterministicParams, learner_state: TD3LearnerState, grads: PyTree
    ) -> tuple[DeterministicParams, TD3OptState, Logs]:
        """Updates the critics and, once every ``policy_period`` updates, the policy."""
        opt_state = learner_state.opt_state
        critics, critics_state, rates = optimizer_step(
            self._critic_optimizer, params.critics, opt_state.critics, grads.critics
        )
        policy, policy_state = jax.lax.cond(
            self._moves_policy(learner_state),
            lambda: optimizer_step(
                self._policy_optimizer, params.policy, opt_state.policy, grads.policy
            )[:2],
            lambda: (params.policy, opt_state.policy),
        )
        policy_rates = self._policy_optimizer.learning_rates(opt_state.policy)
        own = "/critics" if self.cfg.critics_optimizer else ""
        logs = {
            f"learning_rate{own}": rates["learning_rate"],
            "learning_rate/policy": policy_rates["learning_rate"],  # it makes fewer steps
        }
        return DeterministicParams(policy, critics), TD3OptState(policy_state, critics_state), logs

    def update_learner_state(
        self, params: DeterministicParams, learner_state: TD3LearnerState, opt_state: TD3OptState
    ) -> TD3LearnerState:
        """Stores the optimizers' states, and updates the targets whenever the policy is updated."""
        rate = jnp.where(self._moves_policy(learner_state), self.cfg.target_rate, 0.0)
        target = moved_towards(params, learner_state.target_params, rate)
        rng_key = jax.random.split(learner_state.rng_key)[0]
        return TD3LearnerState(opt_state, target, learner_state.num_updates + 1, rng_key)

    def _moves_policy(self, learner_state: TD3LearnerState) -> Array:
        return (learner_state.num_updates + 1) % self.cfg.policy_period == 0
