"""DreamerV3, Hafner et al. (2025), https://doi.org/10.1038/s41586-025-08744-2, arXiv:2301.04104.

A world model is learned from sequences of replay: recurrent states with categories, which predict
observations, rewards and whether the episode goes on. A policy and a critic are learned from what
the model imagines: from each state of the sequences, ``horizon`` steps with the policy's actions.
The critic also learns from the sequences themselves. Acting follows the model: its acting state is
the model's state and the last action.

Rewards and values are distributions over atoms that are evenly spaced in symlog of their numbers.
The policy's advantages are divided by the range of returns if that is above 1. FIRST steps reset
the state, so a sequence may contain several episodes.

The default options are those of the authors' program (github.com/danijar/dreamerv3, configs.yaml).
A sequence starts with the model's state before its first step. With ``write_back`` replay keeps the
states of all steps, and each update gives its sequences the newer ones; otherwise it is the state
that acting had.

Deviations: learning sees all steps of an item, where the authors leave out the first one; losses
of rewards and values are divergences, whose gradients are those of the authors' cross-entropies;
one-hot entries of observations are decoded like numbers; norms have Haiku's eps; illegal actions
are left out in acting only; the recurrent part of a state is computed in float32. Greedy policies
take the most likely categories, and need no random numbers. Priorities, for the prioritized
sampler, are the model's losses.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.configs.world_model import WorldModelConfig
from rlstack.exploration import Counts, explores, initial_counts, next_counts
from rlstack.math import returns
from rlstack.math.value_distributions import SymexpAtoms, categorical_kl
from rlstack.networks.recurrent_model import action_features, features_of, world_model
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import OptimizerConfig, component_optimizer
from rlstack.stateful_params import moved_towards
from rlstack.types import (
    Array,
    Batch,
    LearnerOutput,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Trajectory,
    merge_leading_dims,
)


@dataclasses.dataclass(frozen=True)
class DreamerConfig(Checked):
    """Hyperparameters of DreamerV3; the number of atoms is the network's (``num_atoms``)."""

    model: WorldModelConfig = WorldModelConfig()
    """Sizes of the world model, the policy and the critic."""
    horizon: int = 15
    """Steps that are imagined from each state."""
    discount: float = 1 - 1 / 333
    """Discount of future rewards, per step."""
    return_lambda: float = 0.95
    """Share of later values in the returns; 1 takes the last value only."""
    unimix: float = 0.01
    """Share of the uniform distribution in the distributions of categories and discrete actions."""
    free_nats: float = 1.0
    """Divergence of posterior and prior below which neither learns from it."""
    prior_cost: float = 1.0
    """Weight of the divergence that moves the prior (the dynamics loss)."""
    posterior_cost: float = 0.1
    """Weight of the divergence that moves the posterior (the representation loss)."""
    replay_value_cost: float = 0.3
    """Weight of the critic's loss in the sequences, beside that of what is imagined."""
    slow_value_cost: float = 1.0
    """Weight of the critic's divergence from values of the slow critic."""
    target_rate: float = 0.02
    """Fraction by which the slow critic moves towards the critic at each update."""
    entropy_cost: float = 3e-4
    """Weight of the policy's entropy."""
    return_rate: float = 0.01
    """Fraction by which the range of returns moves at each update."""
    least_range: float = 1.0
    """Smallest range that advantages are divided by."""
    min_std: float = 0.1
    """Smallest standard deviation of continuous actions, which are in [-1, 1]."""
    max_std: float = 1.0
    """Largest standard deviation of continuous actions."""
    max_value: float = 4.85e8
    """Largest absolute value and reward that the atoms represent, e^20. Larger ones count as this
    one."""
    write_back: bool = True
    """Whether replay keeps the model's states of all steps, which updates renew. False needs less
    memory, and is for Reverb, several devices and recorded data."""
    max_grad_norm: float = 0.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(
        "laprop", learning_rate=4e-5, warmup_steps=1_000, arguments={"agc": 0.3}
    )
    """Optimizer of all params."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "return_lambda", "unimix", "target_rate", "return_rate"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        costs = "prior_cost", "posterior_cost", "replay_value_cost", "slow_value_cost"
        self.require_at_least(0, *costs, "entropy_cost", "free_nats", "max_grad_norm")
        self.require_finite(*costs, "entropy_cost", "free_nats", "max_value", "max_std")
        self.require_at_least(1, "horizon")
        self.require("least_range", self.least_range > 0, "positive")
        self.require("max_value", self.max_value > 0, "positive")
        ordered = 0 < self.min_std <= self.max_std
        self.require("min_std", ordered, f"in (0, max_std], with max_std {self.max_std}")


class Latent(NamedTuple):
    """A state of the world model, as acting and replay keep it."""

    recurrent: Array  # [B, D] float32
    classes: Array  # [B, S] int32, the class of each category; -1 before an episode


class DreamerOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: PyTree  # [B, *action], within the spec's bounds
    before: Latent  # the state before the step


class DreamerActions(NamedTuple):
    """The outputs of acting without ``write_back``."""

    action: PyTree  # [B, *action], within the spec's bounds


class DreamerState(NamedTuple):
    """The acting state of each environment."""

    counts: Counts  # kept from one episode to the next
    latent: Latent
    action: Array  # [B, A], the last one as `action_features`; 0 before an episode


class DreamerParams(NamedTuple):
    """The params that the learner publishes."""

    model: Params
    policy: Params
    critic: Params


class DreamerLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    slow_critic: Params
    return_range: Array  # [2] float32, moving 5th and 95th percentile of imagined returns
    rng_key: PRNGKey


class States(NamedTuple):
    """States of the world model in learning, with any leading axes."""

    recurrent: Array  # [..., D]
    categories: Array  # [..., S, K], one-hot rows, with the gradients of probabilities

    def features(self) -> jax.Array:
        """Returns what heads, policy and critic see, ``[..., F]``."""
        return features_of(self.recurrent, self.categories)


class Imagined(NamedTuple):
    """What was imagined of N states, without gradients."""

    features: Array  # [H + 1, N, F]
    action: PyTree  # [H, N, *action], continuous ones in [-1, 1]
    reward: Array  # [H + 1, N], on reaching the state
    discount: Array  # [H + 1, N], of the value of the state


@register(DreamerConfig, network=world_model, older_runtime=False)
class Dreamer(Agent):
    """The agent; construct it as `rlstack.agent.Agent` says, with `world_model` as network."""

    cfg: DreamerConfig
    has_priorities = True
    reads_first_state = True
    writes_back = True  # unless the config says otherwise

    def __init__(self, cfg: DreamerConfig, obs_spec: PyTree, action_spec: PyTree, *args: Any):
        """Builds the world model of the configured sizes.

        Raises:
          ActionKindError: an action is continuous without finite bounds.
        """
        self._unit_spec = jax.tree.map(self._in_units, action_spec)
        super().__init__(cfg, obs_spec, action_spec, *args)
        self.writes_back = cfg.write_back
        self.model = self.network(cfg.model)
        self.atoms = SymexpAtoms(cfg.max_value)
        self._optimizer = component_optimizer(cfg.optimizer, {}, cfg.max_grad_norm)

    def _in_units(self, spec: specs.Array) -> specs.Array:
        if np.issubdtype(spec.dtype, np.integer):
            return spec
        return distributions.bounds_of(spec, type(self).__name__).unit_spec()

    def initial_params(self, rng_key: PRNGKey) -> DreamerParams:
        """Returns newly initialised network parameters."""
        keys = jax.random.split(rng_key, 3)
        parts = self.model, self.model.policy, self.model.critic
        return DreamerParams(*(part.init(key) for part, key in zip(parts, keys, strict=True)))

    def initial_learner_state(self, rng_key: PRNGKey, params: DreamerParams) -> DreamerLearnerState:
        """Returns the optimizer's initial state, with the critic as the slow one."""
        opt_state = self._optimizer.init(params)
        return DreamerLearnerState(opt_state, params.critic, jnp.zeros(2), rng_key)

    def initial_state(self, batch_size: int) -> DreamerState:
        """Returns counts of 0 and empty states of the model, ``[B, ...]``."""
        latent = Latent(
            jnp.zeros((batch_size, self.model.recurrent)),
            jnp.full((batch_size, self.model.categories[0]), -1, jnp.int32),
        )
        action = jnp.zeros((batch_size, self.model.actions))
        return DreamerState(initial_counts(batch_size), latent, action)

    def actor_step(
        self, rng_key: PRNGKey, params: DreamerParams, timestep: TimeStep, state: DreamerState
    ) -> tuple[DreamerOutput | DreamerActions, DreamerState]:
        """Follows ``[B, ...]`` steps in the model, and chooses the actions."""
        latent_key, policy_key = jax.random.split(rng_key)
        states = self._acting(latent_key, params, timestep, state)
        policy = self._policy_at(params, states, timestep)
        unit = self.policy(policy_key, policy, state.counts)
        action = jax.tree.map(self._from_unit, self.action_spec, unit)
        taken = action_features(self.action_spec, action)
        after = DreamerState(next_counts(state.counts, timestep), self._kept(states), taken)
        writes = self.cfg.write_back
        return DreamerOutput(action, state.latent) if writes else DreamerActions(action), after

    def action_distribution(
        self, rng_key: PRNGKey, params: DreamerParams, timestep: TimeStep, state: DreamerState
    ) -> distributions.Distribution:
        """Returns the policy; continuous actions are in the environment's units."""
        latent_key, _ = jax.random.split(rng_key)
        states = self._acting(latent_key, params, timestep, state)

        def moved(policy: Any, spec: specs.Array) -> Any:
            if not isinstance(policy, distributions.Normal):
                return policy
            return distributions.bounds_of(spec, type(self).__name__).normal_from_unit(policy)

        return _mapped(moved, self._policy_at(params, states, timestep), self.action_spec)

    def _acting(
        self, rng_key: PRNGKey, params: DreamerParams, timestep: TimeStep, state: DreamerState
    ) -> States:
        """Returns the model's states at ``[B, ...]`` steps."""
        seen = self.model.see(timestep.observation)
        encoded = self.model.encode(params.model, seen)
        inputs = encoded, state.action, timestep.first()
        key = rng_key if explores(self.policy) else None
        return self._next_state(key, params.model, self._states_of(state.latent), *inputs)[0]

    def _policy_at(
        self, params: DreamerParams, states: States, timestep: TimeStep
    ) -> distributions.Distribution:
        mask = action_mask(timestep.observation)
        return self.policy_of(params.policy, states.features(), mask)

    def _from_unit(self, spec: specs.Array, action: Array) -> Array:
        if np.issubdtype(spec.dtype, np.integer):
            return action
        return distributions.bounds_of(spec, type(self).__name__).from_unit(action)

    def _states_of(self, latent: Latent) -> States:
        """Returns kept states as learning has them; without a class all numbers are 0."""
        one_hot = jax.nn.one_hot(latent.classes, self.model.categories[1])
        return States(latent.recurrent, one_hot)

    def _kept(self, states: States) -> Latent:
        classes = jnp.argmax(states.categories, axis=-1).astype(jnp.int32)
        return Latent(states.recurrent, classes)

    def categories_of(self, logits: Array) -> distributions.Categorical:
        """Returns the distribution of the categories ``[..., S]`` with these logits."""
        return distributions.Categorical(logits).mixed(self.cfg.unimix)

    def drawn(self, rng_key: PRNGKey | None, logits: Array) -> jax.Array:
        """Returns one-hot categories ``[..., S, K]``; without a key the most likely ones.

        Their gradient is that of the probabilities (straight-through).
        """
        categories = self.categories_of(logits)
        chosen = categories.mode() if rng_key is None else categories.sample(rng_key)
        probs = categories.probs()
        one_hot = jax.nn.one_hot(chosen, logits.shape[-1])
        return one_hot + (probs - jax.lax.stop_gradient(probs))

    def _next_state(
        self,
        rng_key: PRNGKey | None,
        model: Params,
        before: States,
        encoded: Array,
        action: Array,
        first: Array,
    ) -> tuple[States, Array]:
        """Returns the states ``[B, ...]`` at steps, and the logits of their posteriors.

        Args:
          rng_key: the key of the categories; None takes the most likely ones.
          model: the params of the model.
          before: the states before the steps; not used where ``first`` holds.
          encoded: ``[B, E]``, of the steps' observations.
          action: ``[B, A]``, those before the steps; not used where ``first`` holds.
          first: ``[B]`` bool, where an episode begins.
        """
        goes_on = 1.0 - first[:, None].astype(jnp.float32)
        recurrent, action = before.recurrent * goes_on, action * goes_on
        recurrent = self.model.follow(
            model, recurrent, before.categories * goes_on[..., None], action
        )
        logits = self.model.posterior(model, recurrent, encoded)
        return States(recurrent, self.drawn(rng_key, logits)), logits

    def policy_of(
        self, policy: Params, features: Array, mask: PyTree = None
    ) -> distributions.Distribution:
        """Returns the policy at features ``[..., F]``; its continuous actions are in [-1, 1].

        The mean of continuous actions is a tanh, and the deviation is between its bounds.
        """
        cfg = self.cfg

        def shaped(part: Any, _: specs.Array) -> Any:
            if not isinstance(part, distributions.Normal):
                return part.mixed(cfg.unimix)
            share = jax.nn.sigmoid(part.log_std + 2.0)
            std = cfg.min_std + (cfg.max_std - cfg.min_std) * share
            return distributions.Normal(jnp.tanh(part.mean), jnp.log(std))

        parameters = self.model.policy.apply(policy, features)
        found = distributions.from_parameters(self._unit_spec, parameters, mask)
        return _mapped(shaped, found, self._unit_spec)

    def values_of(self, critic: Params, features: Array) -> Array:
        """Returns the values at features ``[..., F]``, ``[...]``."""
        return self.atoms.mean(self.model.critic.apply(critic, features))

    def learner_step(
        self, params: DreamerParams, learner_state: DreamerLearnerState, batch: Batch
    ) -> tuple[DreamerParams, DreamerLearnerState, LearnerOutput]:
        """Learns from one batch, and keeps the range of returns that it moved."""
        params, learner_state, output = super().learner_step(params, learner_state, batch)
        moved = jnp.stack([output.logs["return_low"], output.logs["return_high"]])
        return params, learner_state._replace(return_range=moved), output

    def compute_gradients(
        self, params: DreamerParams, learner_state: DreamerLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, the model's losses and the newer states."""
        grads, output = jax.grad(self.loss, has_aux=True)(params, learner_state, batch)
        return grads, output._replace(logs={**output.logs, "grad_norm": optax.tree.norm(grads)})

    def loss(
        self, params: DreamerParams, learner_state: DreamerLearnerState, batch: Batch
    ) -> tuple[Array, LearnerOutput]:
        """Returns the loss, and logs, priorities ``[B]`` and newer states of the items.

        It is the weighted mean over items of the losses of model, policy and critic, each a mean
        over the steps of an item.
        """
        cfg, trajectory = self.cfg, batch.trajectory
        timestep = trajectory.timestep
        _, see_key, imagine_key = jax.random.split(learner_state.rng_key, 3)
        states, posterior, before = self.observed(see_key, params.model, trajectory)
        model_losses = self.model_losses(params.model, states, posterior, timestep)
        of_model = sum(model_losses.values(), jnp.zeros(()))  # [T + 1, B]

        shape = timestep.reward.shape
        flat = merge_leading_dims(states)
        imagined = self.imagined(imagine_key, *jax.lax.stop_gradient((params, flat)))
        logits = self.model.critic.apply(params.critic, imagined.features)
        lambda_returns, moved = self.imagined_returns(logits, imagined, learner_state.return_range)
        of_policy, of_values, entropy = self.behaviour_losses(
            params.policy, learner_state.slow_critic, logits, imagined, lambda_returns, moved
        )
        of_replay = self.replay_value_loss(
            params.critic,
            learner_state.slow_critic,
            states.features(),
            timestep,
            lambda_returns[0].reshape(shape),
        )
        items = of_model.mean(axis=0) + cfg.replay_value_cost * of_replay.mean(axis=0)
        items += (of_policy + of_values).mean(axis=0).reshape(shape).mean(axis=0)
        logs: Logs = {
            "loss": jnp.mean(batch.weights * items),
            **{f"{name}_loss": jnp.mean(x) for name, x in model_losses.items()},
            "policy_loss": jnp.mean(of_policy),
            "value_loss": jnp.mean(of_values),
            "replay_value_loss": jnp.mean(of_replay),
            "entropy": jnp.mean(entropy),
            "value": jnp.mean(lambda_returns),
            "return_low": moved[0],
            "return_high": moved[1],
        }
        priorities = jax.lax.stop_gradient(jnp.maximum(of_model.mean(axis=0), 0.0))
        return logs["loss"], LearnerOutput(logs, priorities, self._newer(before, trajectory))

    def _newer(self, before: States, trajectory: Trajectory) -> DreamerOutput | None:
        """Returns what replaces the stored outputs; the first state of an item stays."""
        if not self.cfg.write_back:
            return None
        none = jax.tree.map(lambda _: None, trajectory.agent_output.action)
        found = jax.lax.stop_gradient(self._kept(before))
        stored = trajectory.agent_output.before
        return DreamerOutput(none, jax.tree.map(lambda x, old: x.at[0].set(old[0]), found, stored))

    def observed(
        self, rng_key: PRNGKey, model: Params, trajectory: Trajectory
    ) -> tuple[States, Array, States]:
        """Follows items ``[T + 1, B, ...]`` in the model, with their observations.

        Returns:
          The states at the steps, the logits of their posteriors, and the states before the steps.
        """
        timestep, taken = trajectory.timestep, trajectory.agent_output.action
        kept = trajectory.agent_output.before if self.cfg.write_back else None
        stored = trajectory.agent_state
        kept, last = jax.tree.map(lambda x: x[0], (kept or stored.latent, stored.action))
        actions = jnp.concatenate([last[None], action_features(self.action_spec, taken)[:-1]])
        rows = merge_leading_dims(timestep.observation)
        encoded = self.model.encode(model, self.model.see(rows))
        encoded = encoded.reshape((*timestep.reward.shape, -1))
        keys = jax.random.split(rng_key, len(encoded))

        def step(before: States, given: Any) -> tuple[States, tuple[States, Array]]:
            key, *inputs = given
            state, logits = self._next_state(key, model, before, *inputs)
            return state, (state, logits)

        first = self._states_of(kept)
        inputs = keys, encoded, actions, timestep.first()
        _, (states, logits) = jax.lax.scan(step, first, inputs)
        before = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), first, states)
        return states, logits, before

    def model_losses(
        self, model: Params, states: States, posterior: Array, timestep: TimeStep
    ) -> dict[str, Array]:
        """Returns the losses of the model at steps, each ``[T + 1, B]`` with its weight.

        Args:
          model: the params of the model.
          states: ``[T + 1, B, ...]``, the states at the steps.
          posterior: the logits of their posteriors.
          timestep: ``[T + 1, B, ...]``.
        """
        cfg, shape = self.cfg, timestep.reward.shape
        seen = self.categories_of(posterior)
        expected = self.categories_of(self.model.prior(model, states.recurrent))
        fixed_seen, fixed_expected = jax.lax.stop_gradient((seen, expected))
        prior_loss = jnp.maximum(fixed_seen.kl(expected).sum(axis=-1), cfg.free_nats)
        posterior_loss = jnp.maximum(seen.kl(fixed_expected).sum(axis=-1), cfg.free_nats)

        flat = merge_leading_dims((states, timestep.observation))
        decoded = self.model.decode(model, *flat[0])
        reconstruction = sum(
            jnp.square(x - y).reshape(shape[0] * shape[1], -1).sum(axis=-1)
            for x, y in zip(*map(jax.tree.leaves, (decoded, self.model.see(flat[1]))), strict=True)
        )
        outlook = self.model.outlook(model, states.features())
        wanted = self.atoms.probs(timestep.reward, outlook.reward)
        continues = timestep.discount * cfg.discount
        return {
            "prior": cfg.prior_cost * prior_loss,
            "posterior": cfg.posterior_cost * posterior_loss,
            "reconstruction": jnp.asarray(reconstruction).reshape(shape),
            "reward": categorical_kl(wanted, outlook.reward),
            "continue": optax.losses.sigmoid_binary_cross_entropy(outlook.continues, continues),
        }

    def imagined(self, rng_key: PRNGKey, params: DreamerParams, states: States) -> Imagined:
        """Imagines ``horizon`` steps from states ``[N, ...]``, with the policy's actions."""

        def step(before: States, key: Any) -> tuple[States, Any]:
            policy_key, latent_key = jax.random.split(key)
            action = self.policy_of(params.policy, before.features()).sample(policy_key)
            numbers = action_features(self._unit_spec, action)
            numbers = jnp.clip(numbers, -1.0, 1.0)  # of what the environment would get
            recurrent = self.model.follow(params.model, *before, numbers)
            logits = self.model.prior(params.model, recurrent)
            after = States(recurrent, self.drawn(latent_key, logits))
            return after, (after, action)

        keys = jax.random.split(rng_key, self.cfg.horizon)
        _, (later, action) = jax.lax.scan(step, states, keys)
        every = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), states, later)
        features = every.features()
        outlook = self.model.outlook(params.model, features)
        reward, discount = self.atoms.mean(outlook.reward), jax.nn.sigmoid(outlook.continues)
        return jax.lax.stop_gradient(Imagined(features, action, reward, discount))

    def imagined_returns(
        self, logits: Array, imagined: Imagined, return_range: Array
    ) -> tuple[Array, Array]:
        """Returns the lambda returns ``[H, N]`` of imagined steps, and the updated return range.

        Args:
          logits: ``[H + 1, N, M]``, of the critic's values.
          imagined: what was imagined.
          return_range: ``[2]``, the range before.
        """
        values = self.atoms.mean(logits)
        found = returns.lambda_returns(
            imagined.reward[1:],
            imagined.discount[1:],
            values,
            self.cfg.return_lambda,
            jnp.ones_like(values[1:], bool),
        )
        found = jax.lax.stop_gradient(found)
        new = jnp.percentile(found, jnp.array([5.0, 95.0]))
        return found, return_range + self.cfg.return_rate * (new - return_range)

    def behaviour_losses(
        self,
        policy: Params,
        slow_critic: Params,
        logits: Array,
        imagined: Imagined,
        lambda_returns: Array,
        return_range: Array,
    ) -> tuple[Array, Array, Array]:
        """Returns the losses of policy and critic, and the policy's entropy, each ``[H, N]``.

        A step counts by its discount: by the probability that the episode has not ended before.

        Args:
          policy: the params of the policy.
          slow_critic: those of the slow critic.
          logits: ``[H + 1, N, M]``, of the critic's values.
          imagined: what was imagined.
          lambda_returns: ``[H, N]``.
          return_range: ``[2]``, its percentiles.
        """
        cfg, features, logits = self.cfg, imagined.features[:-1], logits[:-1]
        weights = jnp.cumprod(imagined.discount, axis=0)[:-1]
        divisor = jnp.maximum(return_range[1] - return_range[0], cfg.least_range)
        advantages = (lambda_returns - jax.lax.stop_gradient(self.atoms.mean(logits))) / divisor
        actions = self.policy_of(policy, features)
        entropy = actions.entropy()
        of_policy = -actions.log_prob(imagined.action) * advantages - cfg.entropy_cost * entropy
        of_values = self.value_loss(logits, lambda_returns, slow_critic, features)
        return weights * of_policy, weights * of_values, entropy

    def value_loss(
        self, logits: Array, wanted: Array, slow_critic: Params, features: Array
    ) -> jax.Array:
        """Returns the divergences of values with logits ``[..., N]`` from wanted and slow ones."""
        slow = self.values_of(slow_critic, features)
        of_slow = categorical_kl(self.atoms.probs(slow, logits), logits)
        of_wanted = categorical_kl(self.atoms.probs(wanted, logits), logits)
        return jnp.asarray(of_wanted + self.cfg.slow_value_cost * of_slow)

    def replay_value_loss(
        self,
        critic: Params,
        slow_critic: Params,
        features: Array,
        timestep: TimeStep,
        bootstrap: Array,
    ) -> jax.Array:
        """Returns the critic's loss at the first T of the steps, ``[T, B]``.

        Its gradient reaches the model too. Targets are lambda returns of the rewards in replay.

        Args:
          critic: the params of the critic.
          slow_critic: those of the slow one.
          features: ``[T + 1, B, F]``, of the steps.
          timestep: ``[T + 1, B, ...]``.
          bootstrap: ``[T + 1, B]``, the imagined returns of the steps.
        """
        after, valid = jax.tree.map(lambda x: x[1:], timestep), ~timestep.first()[1:]
        discounts = after.discount * self.cfg.discount
        wanted = returns.lambda_returns(
            after.reward, discounts, bootstrap, self.cfg.return_lambda, valid
        )
        logits = self.model.critic.apply(critic, features[:-1])
        fixed = jax.lax.stop_gradient(features[:-1])
        return jnp.where(valid, self.value_loss(logits, wanted, slow_critic, fixed), 0.0)

    def update_learner_state(
        self,
        params: DreamerParams,
        learner_state: DreamerLearnerState,
        opt_state: optax.OptState,
    ) -> DreamerLearnerState:
        """Stores the optimizer's state, and updates the slow critic and the key."""
        old = learner_state.slow_critic
        return learner_state._replace(
            opt_state=opt_state,
            slow_critic=moved_towards(params.critic, old, self.cfg.target_rate),
            rng_key=jax.random.split(learner_state.rng_key, 3)[0],
        )


def _mapped(change: Any, policy: distributions.Distribution, spec: PyTree) -> Any:
    """Applies ``change(part, spec)`` to a distribution, or to each part of a joint one."""
    if isinstance(policy, distributions.Joint):
        return distributions.Joint(policy.map(change, spec))
    return change(policy, spec)
