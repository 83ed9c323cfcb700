"""Soft actor-critic, Haarnoja et al. (2018), https://arxiv.org/abs/1812.05905.

Continuous actions use a Gaussian squashed into the bounds, with a learned temperature (section 5).
Discrete actions, masked or not, use exact expectations over the actions (Christodoulou 2019,
https://arxiv.org/abs/1910.07207). Deviations: any number of critics, of which the smallest value
counts; n-step targets (the replay's ``unroll_length``), which leave out the entropy of the
intermediate steps; one pass updates policy, critics and temperature from the same params. Actions
are learned in [-1, 1], so that the entropy has the same meaning in every environment. A truncated
episode is bootstrapped from its true last observation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from rlstack import distributions, exploration
from rlstack.agents.registry import register
from rlstack.exploration import Counts, next_counts
from rlstack.families.off_policy import PolicyAndCriticsAgent, PolicyAndCriticsConfig
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import policy_and_critic
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer, optimizer_step
from rlstack.stateful_params import (
    evaluating,
    moved_towards,
    training,
    weights_of,
    with_weights,
)
from rlstack.types import (
    Array,
    Batch,
    LearnerOutput,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
)


@dataclasses.dataclass(frozen=True)
class SACConfig(PolicyAndCriticsConfig):
    """Hyperparameters of SAC."""

    temperature: float = 1.0
    """Initial weight of the entropy relative to rewards."""
    learn_temperature: bool = True
    """Whether to adjust the temperature so that the entropy approaches target_entropy."""
    target_entropy: float | None = None
    """Entropy to keep, in nats. None takes the values of the papers: minus the number of dimensions
    of a continuous action, and 0.98 of the largest possible entropy of a discrete one, which is
    the logarithm of the number of legal actions."""
    soft_targets: bool = True
    """Whether the critics' targets include the policy's entropy."""
    temperature_optimizer: OptimizerConfig | None = None
    """Optimizer of the temperature's logarithm; None takes optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("temperature", self.temperature > 0, "positive")
        self.require_finite("temperature")
        if self.target_entropy is not None:
            self.require_finite("target_entropy")


class SACOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B] int32, or [B, D] float32 within the spec's bounds


class SACParams(NamedTuple):
    """The params that the learner publishes."""

    policy: Params
    critics: Params  # [N, ...]
    log_temperature: Array  # [] float32


class SACLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_critics: Params  # [N, ...]
    rng_key: PRNGKey


def behaviour_policy(cfg: SACConfig, num_envs: int) -> exploration.Policy:
    """Returns a policy that samples, after random actions at the start."""
    return exploration.WarmUp(exploration.Sample(), cfg.random_frames, num_envs)


@register(SACConfig, network=policy_and_critic, policy=behaviour_policy)
class SAC(PolicyAndCriticsAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with `policy_and_critic` networks."""

    cfg: SACConfig

    def __init__(self, cfg: SACConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if isinstance(self.action_spec, specs.DiscreteArray):
            self._bounds, self._learned_spec = None, self.action_spec
        else:
            self._bounds = distributions.bounds_of(self.action_spec, "SAC")
            self._learned_spec = self._bounds.unit_spec()
        components: Components = {
            ("policy",): cfg.policy_optimizer,
            ("critics",): cfg.critics_optimizer,
            ("temperature", "log_temperature"): cfg.temperature_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> SACParams:
        """Returns newly initialised network parameters and the configured temperature."""
        policy_key, critics_key = jax.random.split(rng_key)
        return SACParams(
            self.network.policy.init(policy_key),
            self.critics.init(critics_key),
            jnp.asarray(math.log(self.cfg.temperature), jnp.float32),
        )

    def initial_learner_state(self, rng_key: PRNGKey, params: SACParams) -> SACLearnerState:
        """Returns the optimizer's initial state, with the critics as the target."""
        return SACLearnerState(self._optimizer.init(params), params.critics, rng_key)

    def action_distribution(
        self, rng_key: PRNGKey, params: SACParams, timestep: TimeStep, state: Counts
    ) -> distributions.Categorical | distributions.TanhNormal:
        """Returns the policy; continuous actions are in [-1, 1]."""
        del rng_key, state
        return self._distribution(params.policy, timestep)

    def actor_step(
        self, rng_key: PRNGKey, params: SACParams, timestep: TimeStep, state: Counts
    ) -> tuple[SACOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; continuous ones are chosen in [-1, 1]."""
        distribution = self.action_distribution(rng_key, params, timestep, state)
        action = self.policy(rng_key, distribution, state)
        if self._bounds is not None:
            action = self._bounds.from_unit(action)
        return SACOutput(action), next_counts(state, timestep)

    def compute_gradients(
        self, params: SACParams, learner_state: SACLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the mean ``|TD error|`` as priorities."""
        _, sample_key = jax.random.split(learner_state.rng_key)
        learned = training(learner_state.rng_key, params)

        def loss(weights: PyTree) -> tuple[Array, tuple[Logs, Array]]:
            params = with_weights(learned, weights)
            return self.loss(sample_key, params, learner_state.target_critics, batch)

        grads, (logs, priorities) = jax.grad(loss, has_aux=True)(weights_of(params))
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, rng_key: PRNGKey, params: SACParams, target_critics: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of three losses. Each of them changes only its own part of the params.

        Equations 5, 7 and 18 of the paper. Importance weights apply to the critics only.

        Returns:
          The sum, (logs, mean |TD errors| [B]).
        """
        now_key, end_key = jax.random.split(rng_key)
        fixed = jax.lax.stop_gradient(evaluating(params))
        temperature = jnp.exp(fixed.log_temperature)
        transition = n_step(batch.trajectory, self.cfg.discount)
        # An item that begins at the last step of an episode has no transition to learn from.
        valid = transition.valid

        value, entropy = self._expect(end_key, fixed.policy, target_critics, transition.end)
        value += temperature * entropy if self.cfg.soft_targets else 0.0
        target = transition.reward + transition.discount * value
        taken = self._values_taken(params.critics, transition)
        td_errors = jnp.where(valid[:, None], target[:, None] - taken, 0.0)
        critic_loss = jnp.mean(batch.weights * 0.5 * jnp.square(td_errors).sum(-1))

        value, entropy = self._expect(now_key, params.policy, fixed.critics, transition.timestep)
        policy_loss = -jnp.where(valid, value + temperature * entropy, 0.0).mean()
        loss = critic_loss + policy_loss
        if self.cfg.learn_temperature:
            surplus = jax.lax.stop_gradient(entropy) - self._target_entropy(transition.timestep)
            loss += (jnp.exp(params.log_temperature) * jnp.where(valid, surplus, 0.0)).mean()
        errors = jnp.abs(td_errors).mean(-1)
        logs: Logs = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "value": jnp.mean(taken),
            "td_error": errors.mean(),
            "entropy": jnp.mean(entropy),
            "temperature": temperature,
        }
        return loss, (logs, errors)

    def _expect(
        self, rng_key: PRNGKey, policy: Params, critics: Params, timestep: TimeStep
    ) -> tuple[Array, Array]:
        """Returns the smallest critic's value of the policy, and its entropy, both ``[B]``.

        For continuous actions they are estimated from one sampled action; for discrete actions they
        are exact.
        """
        distribution = self._distribution(policy, timestep)
        if self._bounds is None:
            values = self.critics.apply(None, critics, timestep, ())[0].min(1)
            return (distribution.probs() * values).sum(-1), distribution.entropy()
        action, log_prob = distribution.sample_and_log_prob(rng_key)
        return self.critic_values(critics, timestep, action).min(1), -log_prob

    def _target_entropy(self, timestep: TimeStep) -> Array | float:
        """Returns the entropy to keep, a number or ``[B]``."""
        if self.cfg.target_entropy is not None:
            return self.cfg.target_entropy
        if self._bounds is not None:
            return -float(self.action_spec.shape[0])
        mask = action_mask(timestep.observation)
        logits = jnp.zeros(self.action_spec.num_values if mask is None else mask.shape)
        equal = distributions.categorical(logits, mask)
        return 0.98 * equal.entropy()

    def critic_input(self, timestep: TimeStep, action: Array) -> TimeStep:
        """Returns the steps, with continuous actions scaled to [-1, 1]."""
        if self._bounds is None:
            return timestep
        return super().critic_input(timestep, self._bounds.to_unit(action))

    def _values_taken(self, critics: Params, transition: NStep) -> Array:
        """Returns every critic's value of the action that was taken, ``[B, N]``."""
        timestep, action = transition.timestep, transition.action
        if self._bounds is not None:
            return self.critic_values(critics, timestep, self._bounds.to_unit(action))
        values = self.critics.apply(None, critics, timestep, ())[0]
        return jnp.take_along_axis(values, action[:, None, None], axis=-1)[..., 0]

    def _distribution(self, policy: Params, timestep: TimeStep) -> Any:
        parameters, _ = self.network.policy.apply(None, policy, timestep, ())
        mask = action_mask(timestep.observation) if self._bounds is None else None
        return distributions.from_parameters(self._learned_spec, parameters, mask, squash=True)

    def apply_gradients(
        self, params: SACParams, learner_state: SACLearnerState, grads: PyTree
    ) -> tuple[SACParams, optax.OptState, Logs]:
        """Takes one step of the optimizer."""
        return optimizer_step(self._optimizer, params, learner_state.opt_state, grads)

    def update_learner_state(
        self, params: SACParams, learner_state: SACLearnerState, opt_state: optax.OptState
    ) -> SACLearnerState:
        """Stores the optimizers' state, and updates the target critics and the key."""
        old = learner_state.target_critics
        target = moved_towards(params.critics, old, self.cfg.target_rate)
        rng_key, _ = jax.random.split(learner_state.rng_key)
        return SACLearnerState(opt_state, target, rng_key)
