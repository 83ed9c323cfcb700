"""Maximum a posteriori policy optimisation, Abdolmaleki et al. (2018).

https://arxiv.org/abs/1806.06920, with the separate bounds on mean and deviation of
https://arxiv.org/abs/1812.02256. A first step weights actions of the target policy by
exp(value / temperature); a second step fits the policy to them within a bound on the KL divergence.
Temperature and multipliers of the bounds are learned. Constants are those of the authors' program,
https://github.com/google-deepmind/acme/tree/master/acme/agents/jax/mpo, and so is the penalty on
actions outside of the bounds (Abdolmaleki et al. 2020, https://arxiv.org/abs/2005.07513).

Discrete actions, masked or not, use exact expectations over the actions. Deviations: critics learn
n-step TD targets (the replay's ``unroll_length``; the program's 5) instead of Retrace, with the
mean over actions of the target policy; any number of critics, of which the smallest value counts;
one pass updates all from the same params. Actions are learned in [-1, 1], by a Gaussian that is not
squashed; critics see them clipped. A truncated episode is bootstrapped from its true last
observation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.exploration import Counts, next_counts
from rlstack.families.off_policy import (
    PolicyAndCriticsConfig,
    SampledAgent,
    sampling_policy,
    squared_errors,
)
from rlstack.math import constraints
from rlstack.math.n_step import NStep, n_step
from rlstack.networks import policy_and_critic
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer
from rlstack.stateful_params import moved_towards, training, weight_gradients
from rlstack.types import Array, Batch, LearnerOutput, Logs, Params, PRNGKey, PyTree, TimeStep

_INITIAL_STD, _LEAST_STD = 0.7, 1e-6
_ALPHA_DISCRETE = 3.0  # initial multiplier of the bound on a discrete policy's divergence


@dataclasses.dataclass(frozen=True)
class MPOConfig(PolicyAndCriticsConfig):
    """Hyperparameters of MPO, with the values of the authors' program."""

    num_critics: int = 1
    """Number of critics. With several, the smallest of their values counts."""
    num_actions: int = 20
    """Number of actions drawn from the target policy in each state; not for discrete actions."""
    epsilon: float = 0.1
    """Bound on the KL divergence of the weighted actions from the target policy."""
    epsilon_mean: float = 2.5e-3
    """Bound on the KL divergence by the policy's mean, of each number of an action; of a discrete
    policy, on the whole divergence."""
    epsilon_std: float = 1e-6
    """Bound on the KL divergence by the policy's standard deviation, of each number."""
    alpha_mean: float = 10.0
    """Initial multiplier of the bound ``epsilon_mean``; not for discrete actions."""
    alpha_std: float = 1000.0
    """Initial multiplier of the bound ``epsilon_std``; not for discrete actions. It falls by about
    the learning rate of ``duals_optimizer`` in an update. Until it is small the standard deviation
    stays nearly as it is; with the values of the authors' program for 100,000 updates."""
    epsilon_penalty: float = 1e-3
    """Bound of the preference for actions within their bounds; 0 has no such preference."""
    temperature: float = 10.0
    """Initial temperature of the weights, in units of value."""
    target_period: int = 100
    """Updates between two updates of the target networks."""
    target_rate: float = 1.0
    """Fraction by which the targets move towards the params at each of their updates."""
    random_frames: int = 0
    """Number of frames with random actions at the start, in all environments together."""
    max_grad_norm: float = 40.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, eps=1e-8)
    """Optimizer of all components without their own optimizer."""
    duals_optimizer: OptimizerConfig | None = OptimizerConfig(learning_rate=1e-2, eps=1e-8)
    """Optimizer of the temperature and the multipliers of the bounds; None takes optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "num_actions", "target_period")
        bounds = "epsilon", "epsilon_mean", "epsilon_std", "alpha_mean", "alpha_std"
        for field in (*bounds, "temperature"):
            self.require(field, 0 < getattr(self, field) < math.inf, "positive and finite")
        self.require_at_least(0, "epsilon_penalty")


class MPOOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B] int32, or [B, D] float32 within the spec's bounds


class MPOParams(NamedTuple):
    """The params that the learner publishes."""

    policy: Params
    critics: Params  # [N, ...]
    duals: dict[str, Array]  # before softplus


class MPOLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_policy: Params
    target_critics: Params  # [N, ...]
    num_updates: Array  # [] int32
    rng_key: PRNGKey


@register(MPOConfig, network=policy_and_critic, policy=sampling_policy, older_runtime=False)
class MPO(SampledAgent):
    """The agent; construct it as `rlstack.agent.Agent` says, with `policy_and_critic` networks."""

    cfg: MPOConfig

    def __init__(self, cfg: MPOConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        components: Components = {
            ("policy",): cfg.policy_optimizer,
            ("critics",): cfg.critics_optimizer,
            ("duals",): cfg.duals_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> MPOParams:
        """Returns newly initialised networks and duals."""
        policy_key, critics_key = jax.random.split(rng_key)
        initial = {"temperature": (self.cfg.temperature, ())}
        if self._bounds is None:
            initial["alpha"] = _ALPHA_DISCRETE, ()
        else:
            initial["alpha_mean"] = self.cfg.alpha_mean, self.action_spec.shape
            initial["alpha_std"] = self.cfg.alpha_std, self.action_spec.shape
            initial["penalty_temperature"] = self.cfg.temperature, ()
        duals: dict[str, Array] = {
            name: jnp.full(shape, constraints.raw_dual(value), jnp.float32)
            for name, (value, shape) in initial.items()
        }
        policy, critics = self.network.policy.init(policy_key), self.critics.init(critics_key)
        return MPOParams(policy, critics, duals)

    def initial_learner_state(self, rng_key: PRNGKey, params: MPOParams) -> MPOLearnerState:
        """Returns the optimizer's initial state, with the networks as the targets."""
        opt_state, count = self._optimizer.init(params), jnp.zeros((), jnp.int32)
        return MPOLearnerState(opt_state, params.policy, params.critics, count, rng_key)

    def action_distribution(
        self, rng_key: PRNGKey, params: MPOParams, timestep: TimeStep, state: Counts
    ) -> Any:
        """Returns the policy; continuous actions are near [-1, 1]."""
        del rng_key, state
        return self.policy_distribution(params.policy, timestep)

    def actor_step(
        self, rng_key: PRNGKey, params: MPOParams, timestep: TimeStep, state: Counts
    ) -> tuple[MPOOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps; continuous ones are clipped to the bounds."""
        distribution = self.policy_distribution(params.policy, timestep)
        return MPOOutput(self.draw(rng_key, distribution, state)), next_counts(state, timestep)

    def compute_gradients(
        self, params: MPOParams, learner_state: MPOLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the mean ``|TD error|`` as priorities."""
        _, sample_key = jax.random.split(learner_state.rng_key)
        learned = training(learner_state.rng_key, params)
        targets = learner_state.target_policy, learner_state.target_critics

        def loss(params: MPOParams) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(sample_key, params, *targets, batch)

        grads, (logs, priorities) = weight_gradients(loss, learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self,
        rng_key: PRNGKey,
        params: MPOParams,
        target_policy: Params,
        target_critics: Params,
        batch: Batch,
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the sum of the losses of critics, policy and duals.

        Importance weights apply to the critics only.

        Returns:
          The sum, (logs, mean |TD errors| [B]).
        """
        now_key, end_key = jax.random.split(rng_key)
        transition = n_step(batch.trajectory, self.cfg.discount)
        target = self._policy_value(end_key, target_policy, target_critics, transition.end)
        target = transition.reward + transition.discount * target
        taken = self.outputs_taken(params.critics, transition)
        learned = squared_errors(target, taken, transition.valid)
        critic_loss = jnp.mean(batch.weights * learned.losses)

        improve = self._improve_discrete if self._bounds is None else self._improve_continuous
        policy_loss, dual_loss, logs = improve(
            now_key, params, target_policy, target_critics, transition
        )
        loss, errors = critic_loss + policy_loss + dual_loss, learned.errors
        return loss, (
            {
                "loss": loss,
                "critic_loss": critic_loss,
                "policy_loss": policy_loss,
                "value": jnp.mean(taken),
                "td_error": jnp.mean(errors),
                "temperature": constraints.dual(params.duals["temperature"]),
                **logs,
            },
            errors,
        )

    def _improve_discrete(
        self,
        rng_key: PRNGKey,
        params: MPOParams,
        target_policy: Params,
        target_critics: Params,
        transition: NStep,
    ) -> tuple[Array, Array, Logs]:
        """Returns the losses of policy and duals, with exact expectations over actions."""
        del rng_key
        cfg, duals, timestep = self.cfg, params.duals, transition.timestep
        mean = _mean_where(transition.valid)
        old = self.policy_distribution(target_policy, timestep)
        new = self.policy_distribution(params.policy, timestep)
        values = self.critics.apply(None, target_critics, timestep, ())[0].min(1)  # [B, A]
        temperature = constraints.dual(duals["temperature"])
        scores = old.log_probs() + values / temperature
        weights = jax.lax.stop_gradient(jax.nn.softmax(scores))
        log_mean = mean(jax.nn.logsumexp(scores, axis=-1))
        dual_loss = constraints.temperature_loss(log_mean, temperature, cfg.epsilon)
        legal = jnp.where(new.legal(), new.log_probs(), 0.0)
        fit = -mean((weights * legal).sum(-1))
        kl = mean(old.kl(new))
        alpha = constraints.dual(duals["alpha"])
        penalty, alpha_loss = constraints.kl_losses(kl, alpha, cfg.epsilon_mean)
        return fit + penalty, dual_loss + alpha_loss, {"kl": kl, "entropy": mean(new.entropy())}

    def _improve_continuous(
        self,
        rng_key: PRNGKey,
        params: MPOParams,
        target_policy: Params,
        target_critics: Params,
        transition: NStep,
    ) -> tuple[Array, Array, Logs]:
        """Returns the losses of policy and duals, estimated from sampled actions."""
        cfg, duals, timestep = self.cfg, params.duals, transition.timestep
        mean = _mean_where(transition.valid)
        old = self.policy_distribution(target_policy, timestep)
        new = self.policy_distribution(params.policy, timestep)
        actions = self._draw(rng_key, old)  # [K, B, D]
        values = self._values_of(target_critics, timestep, actions)
        temperature = constraints.dual(duals["temperature"])
        weights, log_mean = _weights(values, temperature)
        dual_loss = constraints.temperature_loss(mean(log_mean), temperature, cfg.epsilon)
        if cfg.epsilon_penalty:
            outside = actions - jnp.clip(actions, -1.0, 1.0)
            distance = jnp.sqrt(jnp.square(outside).sum(-1))
            of_penalty = constraints.dual(duals["penalty_temperature"])
            more, log_mean = _weights(-distance, of_penalty)
            weights += more
            dual_loss += constraints.temperature_loss(
                mean(log_mean), of_penalty, cfg.epsilon_penalty
            )
        by_mean = distributions.Normal(new.mean, old.log_std)
        by_std = distributions.Normal(old.mean, new.log_std)
        log_probs = by_mean.log_prob(actions) + by_std.log_prob(actions)
        policy_loss = -mean((weights * log_probs).sum(0))

        kls = [mean(kl) for kl in old.decoupled_kl(new)]  # each [D]
        for kl, name, bound in zip(
            kls, ("alpha_mean", "alpha_std"), (cfg.epsilon_mean, cfg.epsilon_std), strict=True
        ):
            penalty, alpha_loss = constraints.kl_losses(kl, constraints.dual(duals[name]), bound)
            policy_loss, dual_loss = policy_loss + penalty, dual_loss + alpha_loss
        logs: Logs = {
            "kl_mean": kls[0].mean(),
            "kl_std": kls[1].mean(),
            "entropy": mean(new.entropy()),
        }
        return policy_loss, dual_loss, logs

    def _policy_value(
        self, rng_key: PRNGKey, policy: Params, critics: Params, timestep: TimeStep
    ) -> Array:
        """Returns the smallest critic's mean value of the policy's actions, ``[B]``."""
        distribution = self.policy_distribution(policy, timestep)
        if self._bounds is None:
            values = self.critics.apply(None, critics, timestep, ())[0]
            return (distribution.probs()[:, None] * values).sum(-1).min(1)
        return self._values_of(critics, timestep, self._draw(rng_key, distribution)).mean(0)

    def _draw(self, rng_key: PRNGKey, distribution: distributions.Normal) -> Array:
        """Returns actions ``[K, B, D]``, not clipped and without gradients."""
        keys = jax.random.split(rng_key, self.cfg.num_actions)
        return jax.lax.stop_gradient(jax.vmap(distribution.sample)(keys))

    def _values_of(self, critics: Params, timestep: TimeStep, actions: Array) -> Array:
        """Returns the smallest critic's values of actions ``[K, B, D]``, ``[K, B]``."""
        clipped = jnp.clip(actions, -1.0, 1.0)
        return jax.vmap(lambda action: self.critic_values(critics, timestep, action).min(1))(
            clipped
        )

    def policy_distribution(self, policy: Params, timestep: TimeStep) -> Any:
        """Returns the policy, a Categorical or a Normal."""
        parameters, _ = self.network.policy.apply(None, policy, timestep, ())
        if self._bounds is None:
            return distributions.categorical(parameters, action_mask(timestep.observation))
        mean, raw = jnp.split(parameters, 2, axis=-1)
        std = jax.nn.softplus(raw) * (_INITIAL_STD / math.log(2.0)) + _LEAST_STD
        return distributions.Normal(mean, jnp.log(std))

    def update_learner_state(
        self, params: MPOParams, learner_state: MPOLearnerState, opt_state: optax.OptState
    ) -> MPOLearnerState:
        """Stores the optimizer's state, and updates the targets once every ``target_period``."""
        count = learner_state.num_updates + 1
        rate = jnp.where(count % self.cfg.target_period == 0, self.cfg.target_rate, 0.0)
        old = learner_state.target_policy, learner_state.target_critics
        policy, critics = moved_towards((params.policy, params.critics), old, rate)
        rng_key, _ = jax.random.split(learner_state.rng_key)
        return MPOLearnerState(opt_state, policy, critics, count, rng_key)


def _mean_where(valid: Array) -> Any:
    """Returns a function to the mean over the batch, ``[B, ...]``; other rows count as 0."""

    def mean(x: Array) -> Array:
        return jnp.where(valid.reshape((-1, *(1,) * (x.ndim - 1))), x, 0.0).mean(0)

    return mean


def _weights(values: Array, temperature: Array) -> tuple[Array, Array]:
    """Returns the weights of actions, ``[K, B]``, and the log of the mean of exp, ``[B]``."""
    scores = jax.lax.stop_gradient(values) / temperature
    log_mean = jax.nn.logsumexp(scores, axis=0) - math.log(values.shape[0])
    return jax.lax.stop_gradient(jax.nn.softmax(scores, axis=0)), log_mean
