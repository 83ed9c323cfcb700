"""Soft actor-critic, Haarnoja et al. (2018), https://arxiv.org/abs/1812.05905.

Continuous actions use a Gaussian squashed into the bounds, with a learned temperature (section 5).
Discrete actions, masked or not, use exact expectations over the actions (Christodoulou 2019,
https://arxiv.org/abs/1910.07207). Deviations: any number of critics, of which the smallest value
counts; n-step targets (the replay's ``unroll_length``), which leave out the entropy of the
intermediate steps; one pass updates policy, critics and temperature from the same params. Actions
are learned in [-1, 1], so that the entropy has the same meaning in every environment. A truncated
episode is bootstrapped from its true last observation.

Two refinements for many updates a frame (the replay's ``samples_per_insert``) are experiments with
this agent, not other agents. REDQ, Chen et al. (2021), https://arxiv.org/abs/2101.05982:
``num_critics`` 10, ``target_subset`` 2, ``policy_value`` mean, and ``policy_period`` 20 with 20
updates a frame. DroQ, Hiraoka et al. (2022), https://arxiv.org/abs/2110.02034: two critics with
dropout and layer norm, ``dropout_in_targets``, ``policy_value`` mean and the same periods.
Deviations from DroQ: dropout comes after the activation, and the values that the policy maximises
are without dropout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.exploration import Counts, next_counts
from rlstack.families.off_policy import (
    CriticLosses,
    PolicyAndCriticsConfig,
    SampledAgent,
    sampling_policy,
    squared_errors,
)
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import policy_and_critic
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer, optimizer_step
from rlstack.stateful_params import evaluating, moved_towards, training, weight_gradients
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
    target_entropy_scale: float = 1.0
    """Factor of the papers' values, which apply if target_entropy is None."""
    soft_targets: bool = True
    """Whether the critics' targets include the policy's entropy."""
    temperature_optimizer: OptimizerConfig | None = None
    """Optimizer of the temperature's logarithm; None takes optimizer."""
    target_subset: int = 0
    """Number of critics, drawn anew for each update, of which the smallest value counts in targets
    (REDQ: 2). 0 takes all."""
    policy_value: Literal["min", "mean"] = "min"
    """What the policy maximises: the smallest value of the critics, or their mean (REDQ, DroQ)."""
    policy_period: int = 1
    """Updates of the critics for each update of the policy and the temperature. Above 1 the
    gradients of critics and policy are clipped separately, and logs of the learning rate are the
    critics' and learning_rate/policy."""
    dropout_in_targets: bool = False
    """Whether targets are computed with dropout, as in DroQ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        subset = 0 <= self.target_subset <= self.num_critics
        self.require("target_subset", subset, f"in 0..num_critics ({self.num_critics})")
        self.require_at_least(1, "policy_period")
        self.require("temperature", self.temperature > 0, "positive")
        self.require_finite("temperature")
        self.require_finite("target_entropy_scale")
        if self.target_entropy is not None:
            self.require_finite("target_entropy")
            rule = "1 where target_entropy is given"
            self.require("target_entropy_scale", self.target_entropy_scale == 1, rule)

    def require_plain_targets(self, why: str) -> None:
        """Checks that the options of targets made of several critics are off.

        Raises:
          ValueError: one is on; the message says why it must be off.
        """
        self.require("target_subset", not self.target_subset, f"0, because {why}")
        self.require("dropout_in_targets", not self.dropout_in_targets, "False for this agent")


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

    opt_state: optax.OptState  # with policy_period above 1, SACOptState
    target_critics: Params  # [N, ...]
    rng_key: PRNGKey
    num_updates: Any = ()  # [] int32; with a policy_period of 1, ()


class SACOptState(NamedTuple):
    """The states of two optimizers, where the policy is updated less often than the critics."""

    critics: optax.OptState
    others: optax.OptState


@register(SACConfig, network=policy_and_critic, policy=sampling_policy)
class SAC(SampledAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with `policy_and_critic` networks."""

    cfg: SACConfig

    def __init__(self, cfg: SACConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        bounds = self._bounds
        self._learned_spec = self.action_spec if bounds is None else bounds.unit_spec()
        self._is_delayed = cfg.policy_period > 1
        of_critics = cfg.critics_optimizer
        others: Components = {
            ("policy",): cfg.policy_optimizer,
            ("temperature", "log_temperature"): cfg.temperature_optimizer,
        }
        components = others if self._is_delayed else {("critics",): of_critics, **others}
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)
        self._critics_optimizer = component_optimizer(
            of_critics or cfg.optimizer, {}, cfg.max_grad_norm
        )

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
        if not self._is_delayed:
            return SACLearnerState(self._optimizer.init(params), params.critics, rng_key)
        opt_state = SACOptState(
            self._critics_optimizer.init(params.critics),
            self._optimizer.init(params._replace(critics=())),
        )
        count = jnp.zeros((), jnp.int32)
        return SACLearnerState(opt_state, params.critics, rng_key, count)

    def action_distribution(
        self, rng_key: PRNGKey, params: SACParams, timestep: TimeStep, state: Counts
    ) -> distributions.Categorical | distributions.TanhNormal:
        """Returns the policy; continuous actions are in [-1, 1]."""
        del rng_key, state
        return self.policy_distribution(params.policy, timestep)

    def actor_step(
        self, rng_key: PRNGKey, params: SACParams, timestep: TimeStep, state: Counts
    ) -> tuple[SACOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; continuous ones are chosen in [-1, 1]."""
        distribution = self.action_distribution(rng_key, params, timestep, state)
        return SACOutput(self.draw(rng_key, distribution, state)), next_counts(state, timestep)

    def compute_gradients(
        self, params: SACParams, learner_state: SACLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the mean ``|TD error|`` as priorities."""
        _, sample_key = jax.random.split(learner_state.rng_key)
        learned = training(learner_state.rng_key, params)
        moves = self._moves_policy(learner_state) if self._is_delayed else None

        def loss(params: SACParams) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(sample_key, params, learner_state.target_critics, batch, moves)

        grads, (logs, priorities) = weight_gradients(loss, learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self,
        rng_key: PRNGKey,
        params: SACParams,
        target_critics: Params,
        batch: Batch,
        moves: Array | None = None,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of three losses. Each of them changes only its own part of the params.

        Equations 5, 7 and 18 of the paper. Importance weights apply to the critics only. Where
        ``moves`` is False, the policy gets no gradient from the critics, which saves its time.

        Returns:
          The sum, (logs, mean |TD errors| [B]).
        """
        now_key, end_key = jax.random.split(rng_key)
        fixed = jax.lax.stop_gradient(evaluating(params))
        temperature = jnp.exp(fixed.log_temperature)
        transition = n_step(batch.trajectory, self.cfg.discount)
        # An item that begins at the last step of an episode has no transition to learn from.
        valid = transition.valid

        learned = self.critic_losses(end_key, params.critics, fixed, target_critics, transition)
        critic_loss = jnp.mean(batch.weights * learned.losses)

        def judge(values: Array) -> Array:
            return values.min(1) if self.cfg.policy_value == "min" else values.mean(1)

        value, entropy = self.expect(
            now_key, params.policy, fixed.critics, transition.timestep, judge, moves
        )
        policy_loss = -jnp.where(valid, value + temperature * entropy, 0.0).mean()
        loss = critic_loss + policy_loss
        if self.cfg.learn_temperature:
            surplus = jax.lax.stop_gradient(entropy) - self._target_entropy(transition.timestep)
            loss += (jnp.exp(params.log_temperature) * jnp.where(valid, surplus, 0.0)).mean()
        logs: Logs = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "value": jnp.mean(learned.values),
            "td_error": jnp.mean(learned.errors),
            "entropy": jnp.mean(entropy),
            "temperature": temperature,
        }
        return loss, (logs, learned.errors)

    def critic_losses(
        self,
        rng_key: PRNGKey,
        critics: Params,
        fixed: SACParams,
        target_critics: Params,
        transition: NStep,
    ) -> CriticLosses:
        """Returns the squared TD errors of all critics (equation 5 of the paper).

        Args:
          rng_key: a key for the action at the end of the transition.
          critics: the params that are learned.
          fixed: all params, without gradients, in evaluation mode.
          target_critics: the params of the target critics.
          transition: the transitions.
        """

        def judge(values: Array) -> Array:
            if self.cfg.target_subset:
                key = jax.random.fold_in(rng_key, 1)
                order = jax.random.permutation(key, self.cfg.num_critics)
                values = jnp.take(values, order[: self.cfg.target_subset], axis=1)
            return values.min(1)

        if self.cfg.dropout_in_targets:
            target_critics = training(rng_key, target_critics)
        value, entropy = self.expect(rng_key, fixed.policy, target_critics, transition.end, judge)
        value += self.entropy_weight(fixed) * entropy
        target = transition.reward + transition.discount * value
        return squared_errors(target, self.outputs_taken(critics, transition), transition.valid)

    def entropy_weight(self, fixed: SACParams) -> Array:
        """Returns the weight of the entropy in targets, []: the temperature, or 0."""
        return jnp.exp(fixed.log_temperature) * self.cfg.soft_targets

    def expect(
        self,
        rng_key: PRNGKey,
        policy: Params,
        critics: Params,
        timestep: TimeStep,
        judge: Callable[[Array], Array],
        moves: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the value of the policy, and its entropy, both ``[B]``.

        For continuous actions they are estimated from one sampled action; for discrete actions they
        are exact. ``judge`` maps the critics' values ``[B, N, ...]`` to one, ``[B, ...]``.
        """
        distribution = self.policy_distribution(policy, timestep)
        if self._bounds is None:
            outputs = self.critics.apply(None, critics, timestep, ())[0]
            value = (distribution.probs() * judge(self.means(outputs))).sum(-1)
            return value, distribution.entropy()
        action, log_prob = distribution.sample_and_log_prob(rng_key)

        def value_of(action: Array) -> Array:
            return judge(self.critic_values(critics, timestep, action))

        if moves is None:
            return value_of(action), -log_prob
        fixed = jax.lax.stop_gradient(action)
        return jax.lax.cond(moves, lambda: value_of(action), lambda: value_of(fixed)), -log_prob

    def _target_entropy(self, timestep: TimeStep) -> Array | float:
        """Returns the entropy to keep, a number or ``[B]``."""
        if self.cfg.target_entropy is not None:
            return self.cfg.target_entropy
        scale = self.cfg.target_entropy_scale
        if self._bounds is not None:
            return -scale * self.action_spec.shape[0]
        mask = action_mask(timestep.observation)
        logits = jnp.zeros(self.action_spec.num_values if mask is None else mask.shape)
        equal = distributions.categorical(logits, mask)
        return 0.98 * scale * equal.entropy()

    def policy_distribution(self, policy: Params, timestep: TimeStep) -> Any:
        """Returns the policy; continuous actions are in [-1, 1]."""
        parameters, _ = self.network.policy.apply(None, policy, timestep, ())
        mask = action_mask(timestep.observation) if self._bounds is None else None
        return distributions.from_parameters(self._learned_spec, parameters, mask, squash=True)

    def apply_gradients(
        self, params: SACParams, learner_state: SACLearnerState, grads: PyTree
    ) -> tuple[SACParams, optax.OptState, Logs]:
        """Takes one step of the optimizer; see ``policy_period``."""
        opt_state = learner_state.opt_state
        if not self._is_delayed:
            return optimizer_step(self._optimizer, params, opt_state, grads)
        critics, critics_state, rates = optimizer_step(
            self._critics_optimizer, params.critics, opt_state.critics, grads.critics
        )
        others, other_grads = (tree._replace(critics=()) for tree in (params, grads))
        others, others_state = jax.lax.cond(
            self._moves_policy(learner_state),
            lambda: optimizer_step(self._optimizer, others, opt_state.others, other_grads)[:2],
            lambda: (others, opt_state.others),
        )
        of_policy = self._optimizer.learning_rates(opt_state.others)
        logs = {**rates, "learning_rate/policy": of_policy["learning_rate"]}
        return others._replace(critics=critics), SACOptState(critics_state, others_state), logs

    def update_learner_state(
        self, params: SACParams, learner_state: SACLearnerState, opt_state: optax.OptState
    ) -> SACLearnerState:
        """Stores the optimizers' state, and updates the target critics and the key."""
        old = learner_state.target_critics
        target = moved_towards(params.critics, old, self.cfg.target_rate)
        rng_key, _ = jax.random.split(learner_state.rng_key)
        count = learner_state.num_updates + 1 if self._is_delayed else ()
        return SACLearnerState(opt_state, target, rng_key, count)

    def _moves_policy(self, learner_state: SACLearnerState) -> Array:
        return (learner_state.num_updates + 1) % self.cfg.policy_period == 0
