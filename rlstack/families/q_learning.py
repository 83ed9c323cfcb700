"""The base classes of agents that learn action values; each agent has its own loss.

The config can add double learning (van Hasselt et al. 2016, arXiv:1509.06461), n-step targets (the
replay's ``unroll_length``), prioritized replay (Schaul et al. 2016, arXiv:1511.05952; the replay's
sampler), duelling networks (Wang et al. 2016, arXiv:1511.06581) and noisy networks (Fortunato et
al. 2018, arXiv:1706.10295; both are options of the network). A truncated episode is bootstrapped
from its true last observation.

A noisy network draws new noise at every acting step. An update draws noise three times: for the
values that are learned, for the target network, and for the choice of the next action. An agent
with the greedy policy acts with the mean weights.

A network with state or dropout computes the values that are learned in training mode; acting, the
target network and the choice of the next action are in evaluation mode. The target network has
running statistics of its own, which follow those of the params as its weights follow theirs.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.checks import Checked
from rlstack.exploration import (
    Counts,
    EpsilonGreedy,
    Linear,
    Policy,
    explores,
    initial_counts,
    next_counts,
)
from rlstack.math.n_step import NStep
from rlstack.networks.torsos import action_mask
from rlstack.optimizers import OptimizerConfig, component_optimizer
from rlstack.stateful_params import evaluating, moved_towards, training, weight_gradients
from rlstack.types import (
    AgentState,
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
class QLearningConfig(Checked):
    """Hyperparameters of all agents that learn action values."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    double: bool = True
    """Whether the online network chooses the action that the target network values."""
    target_period: int = 250
    """Updates between two copies of the params to the target. Ignored if target_rate is above 0."""
    target_rate: float = 0.0
    """Fraction by which the target moves towards the params at each update. 0: copies every
    target_period."""
    max_grad_norm: float = 10.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of all components without their own optimizer."""
    torso_optimizer: OptimizerConfig | None = None
    """Optimizer of all layers before the heads. None takes optimizer, as for all components; on the
    command line, options not given are those of optimizer."""
    value_head_optimizer: OptimizerConfig | None = None
    """Optimizer of the heads, which give the actions' values; None takes optimizer."""
    epsilon_start: float = 1.0
    """Probability of a random action at the first frame."""
    epsilon_end: float = 0.05
    """Probability of a random action after epsilon_frames."""
    epsilon_frames: int = 10_000
    """Frames of all environments together over which the probability falls linearly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "target_rate", "epsilon_start", "epsilon_end"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(1, "target_period", "epsilon_frames")


class QOutput(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B] int32


class TargetLearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_params: Params
    num_updates: Array  # [] int32
    rng_key: PRNGKey


class TargetNetworkAgent(Agent):
    """An agent with one network and a slower copy of it, the target network.

    It reads ``optimizer``, ``max_grad_norm``, ``target_rate`` and ``target_period`` of its config
    and, if they are there, ``torso_optimizer`` and ``value_head_optimizer``; `QLearningConfig`
    explains them.
    """

    has_priorities = True

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        components = {
            ("torso", "core", "fraction_embedding", "quantile_layer"): "torso_optimizer",
            ("value_head", "state_value_head"): "value_head_optimizer",
        }
        own = {modules: getattr(cfg, field, None) for modules, field in components.items()}
        self._optimizer = component_optimizer(cfg.optimizer, own, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns newly initialised network parameters."""
        return self.network.init(rng_key)

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> TargetLearnerState:
        """Returns the optimizer's initial state, with the params as the target."""
        return TargetLearnerState(
            self._optimizer.init(params), params, jnp.zeros((), jnp.int32), rng_key
        )

    def update_learner_state(
        self, params: Params, learner_state: TargetLearnerState, opt_state: optax.OptState
    ) -> TargetLearnerState:
        """Stores the optimizer's state, counts the update, and updates the target params.

        The target params move towards the params at each update (Polyak averaging), or are replaced
        by them periodically (Mnih et al. 2015).
        """
        num_updates, target = learner_state.num_updates + 1, learner_state.target_params
        if self.cfg.target_rate:
            target = moved_towards(params, target, self.cfg.target_rate)
        else:
            target = optax.periodic_update(params, target, num_updates, self.cfg.target_period)
        return learner_state._replace(
            opt_state=opt_state, target_params=target, num_updates=num_updates
        )


class SequenceState(NamedTuple):
    """The acting state of each environment, for agents that learn from sequences."""

    counts: Counts  # kept from one episode to the next
    core: AgentState  # [B, ...] the recurrent core's state


class SequenceQLearning(TargetNetworkAgent):
    """An agent that learns action values from sequences, with a recurrent network or without.

    The first ``burn_in`` steps of a sequence only bring the core's state up to date, which is
    stored with its first step. A subclass states ``reads_first_state`` and defines `loss`.
    """

    @abc.abstractmethod
    def loss(
        self, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, priorities ``[B]``); the gradient is that of ``params`` only."""

    def of_network(self, params: Params) -> Params:
        """Returns the part of the agent's params that the network takes, by default all."""
        return params

    def initial_state(self, batch_size: int) -> SequenceState:
        """Returns counts of 0 and the core's initial state, ``[B, ...]``."""
        return SequenceState(initial_counts(batch_size), self.network.initial_state(batch_size))

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: SequenceState
    ) -> tuple[QOutput, SequenceState]:
        """Chooses actions for ``[B, ...]`` steps; the policy sees values as logits."""
        values, core = self.network.apply(None, self.of_network(params), timestep, state.core)
        action = self.policy(rng_key, preferences(values, timestep), state.counts)
        return QOutput(action), SequenceState(next_counts(state.counts, timestep), core)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: SequenceState
    ) -> distributions.Categorical:
        """Returns the legal choices, with their values as logits."""
        del rng_key
        values = self.network.apply(None, self.of_network(params), timestep, state.core)[0]
        return preferences(values, timestep)

    def compute_gradients(
        self, params: Params, learner_state: TargetLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the sequences' new priorities."""
        learned = training(learner_state.rng_key, params, learner_state.num_updates)

        def loss(params: Params) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(params, learner_state.target_params, batch)

        grads, (logs, priorities) = weight_gradients(loss, learned)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def values(self, params: Params, trajectory: Trajectory) -> Array:
        """Returns the action values of the steps after the burn-in, ``[T + 1 - burn_in, B, A]``."""
        after, core = self.after_burn_in(params, trajectory)
        return self.network.unroll(None, self.of_network(params), after, core)[0]

    def after_burn_in(self, params: Params, trajectory: Trajectory) -> tuple[TimeStep, AgentState]:
        """Returns the steps after the burn-in, and the core's state before them.

        The core starts from the stored state of the first step. No gradient flows through the
        burn-in, which is in evaluation mode.

        Raises:
          ValueError: the burn-in is as long as the sequence.
        """
        burn_in, length = self.cfg.burn_in, trajectory.timestep.step_type.shape[0] - 1
        if burn_in >= length:
            raise ValueError(
                f"{type(self).__name__}: burn_in ({burn_in}) must be less than the sequence's "
                f"{length} transitions. Raise --replay.unroll-length, or lower --agent.burn-in."
            )
        core = jax.tree.map(lambda x: x[0], trajectory.agent_state.core)
        if burn_in:
            before = jax.tree.map(lambda x: x[:burn_in], trajectory.timestep)
            fixed = evaluating(self.of_network(params))
            _, core = self.network.unroll(None, fixed, before, core)
        after = jax.tree.map(lambda x: x[burn_in:], trajectory.timestep)
        return after, jax.lax.stop_gradient(core)


class QLearning(TargetNetworkAgent):
    """An agent that learns action values from transitions.

    A subclass defines two functions: `action_values`, which acting uses, and `loss`.
    """

    cfg: QLearningConfig
    has_values = True

    def __init__(self, cfg: QLearningConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if jax.tree.leaves(self.network.initial_state(1)):
            raise ValueError(
                f"{type(self).__name__}: the network must be feed-forward, since transitions carry "
                "no recurrent state. Use --network.core none, or an agent of sequences such as ppo."
            )

    @abc.abstractmethod
    def action_values(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns the value of each action, ``[B, A]``, with or without the network's noise."""

    @abc.abstractmethod
    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, priorities ``[B]``); the gradient is that of ``params`` only."""

    def outputs(self, rng_key: PRNGKey | None, params: Params, timestep: TimeStep) -> Array:
        """Returns the network's output for each action, ``[B, A, ...]``; no noise without a key."""
        return self.network.apply(rng_key, params, timestep, ())[0]

    def trajectory_values(self, params: Params, trajectory: Trajectory) -> Array:
        """Returns the highest value of a legal action, without the network's noise."""
        steps = trajectory.timestep
        rows = merge_leading_dims(steps)
        values = self.action_values(jax.random.PRNGKey(0), params, rows, noisy=False)
        best = preferences(values, rows).mode()
        return of_actions(values, best).reshape(steps.step_type.shape)

    def initial_state(self, batch_size: int) -> Counts:
        """Returns the counts of steps and episodes of each environment, ``[B]``, which are 0."""
        return initial_counts(batch_size)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: Counts
    ) -> distributions.Categorical:
        """Returns the legal choices, with their values as logits."""
        del state
        noisy = explores(self.policy)
        return preferences(self.action_values(rng_key, params, timestep, noisy=noisy), timestep)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: Counts
    ) -> tuple[QOutput, Counts]:
        """Chooses actions for ``[B, ...]`` steps."""
        network_key, policy_key = jax.random.split(rng_key)
        distribution = self.action_distribution(network_key, params, timestep, state)
        return QOutput(self.policy(policy_key, distribution, state)), next_counts(state, timestep)

    def compute_gradients(
        self, params: Params, learner_state: TargetLearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss` with respect to the weights, its logs and priorities."""
        loss_key = jax.random.split(learner_state.rng_key)[1]
        learned = training(learner_state.rng_key, params)

        def loss(params: Params) -> tuple[Array, tuple[Logs, Array]]:
            return self.loss(loss_key, params, learner_state.target_params, batch)

        grads, (logs, priorities) = weight_gradients(loss, learned)
        return grads, LearnerOutput(logs, priorities)

    def apply_gradients(
        self, params: Params, learner_state: TargetLearnerState, grads: PyTree
    ) -> tuple[Params, optax.OptState, Logs]:
        """Also logs the norm of the gradients, which is no mean of the norms of parts."""
        *after, logs = super().apply_gradients(params, learner_state, grads)
        return *after, {"grad_norm": optax.tree.norm(grads), **logs}

    def update_network_state(
        self, params: Params, learner_state: TargetLearnerState, batch: Batch
    ) -> Params:
        """Returns the params with the state after a pass over the items' first steps."""
        if self.network.new_state is None:
            return params
        learned = training(learner_state.rng_key, params)
        timestep = self.network_input(jax.tree.map(lambda x: x[:1], batch.trajectory.timestep))
        return params._replace(state=self.network.new_state(learned, timestep, ()))

    def network_input(self, timestep: TimeStep) -> TimeStep:
        """Returns the steps as the network takes them, by default unchanged."""
        return timestep

    def update_learner_state(
        self, params: Params, learner_state: TargetLearnerState, opt_state: optax.OptState
    ) -> TargetLearnerState:
        """Also replaces the key."""
        moved = super().update_learner_state(params, learner_state, opt_state)
        return moved._replace(rng_key=jax.random.split(learner_state.rng_key)[0])


def preferences(values: Array, timestep: TimeStep) -> distributions.Categorical:
    """Returns the legal choices with values ``[B, A]`` as logits; its mode is the best action."""
    return distributions.categorical(values, action_mask(timestep.observation))


def values_of(values: Array, actions: Array) -> Array:
    """Selects the value of each action ``[...]`` from ``[..., A]``."""
    return jnp.take_along_axis(values, actions[..., None], axis=-1)[..., 0]


def of_actions(outputs: Array, actions: Array) -> Array:
    """Selects each row's action from ``[B, A, ...]``; returns ``[B, ...]``."""
    return outputs[jnp.arange(len(actions)), actions]


def td_loss(
    losses: Array, priorities: Array, values: Array, transition: NStep, weights: Array
) -> tuple[Array, tuple[Logs, Array]]:
    """Returns the weighted mean of the items' losses, (logs, priorities ``[B]``).

    Args:
      losses: the loss of each item, ``[B]``.
      priorities: the items' new priorities in replay, ``[B]``.
      values: values of the actions taken, ``[B]``, for the logs.
      transition: the items. An item that begins at the last step of an episode has no transition to
          learn from: its loss and its priority are 0.
      weights: importance weights of the items, ``[B]``.
    """
    losses, priorities = (jnp.where(transition.valid, x, 0.0) for x in (losses, priorities))
    loss = jnp.mean(weights * losses)
    logs: Logs = {"loss": loss, "value": jnp.mean(values), "priority": jnp.mean(priorities)}
    return loss, (logs, priorities)


def behaviour_policy(cfg: Any, num_envs: int) -> Policy:
    """Returns epsilon-greedy with an epsilon that falls over the frames of all environments.

    With noisy networks epsilon may be 0 from the start: the noise explores. The config has the
    fields ``epsilon_start``, ``epsilon_end`` and ``epsilon_frames``, as `QLearningConfig`.
    """
    return EpsilonGreedy(
        Linear(cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_frames, num_envs=num_envs)
    )
