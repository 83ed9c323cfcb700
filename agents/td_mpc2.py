"""TD-MPC2 for one task, Hansen et al. (2024), https://arxiv.org/abs/2310.16828.

A model of latent states, rewards and values is learned from sequences of replay, and a policy in
its states. Acting plans: model predictive path integral control (MPPI) draws sequences of
``horizon`` actions, keeps those of the largest predicted return, whose end is a value of the
critics, and draws anew around their weighted mean. The mean is the acting state: the next step of
the episode begins its plan with it, moved by one step.

An item of replay is a sequence of ``horizon`` transitions; further ones are not used. Rewards and
values are distributions over atoms of symlog, and targets are divided between two atoms. Nothing is
learned of what follows the end of an episode in an item. A truncation is bootstrapped from its true
last observation, a termination is not.

The default options are those of the authors' program (github.com/nicklashansen/tdmpc2, config.yaml)
for a single task. It learns the encoder with 0.3 times the learning rate (``encoder_optimizer``;
the presets have it), once for each step, from batches of 256 items; it takes random actions for the
first five episodes, and at least 1,000 steps. For episodes of L steps its discount is
(L - 5) / L, within [0.95, 0.995].

Deviations: the two critics whose mean counts are drawn once for a plan, where the authors draw them
in each iteration; orthogonal initial weights; no dropout in critics; the encoder has as many layers
as the other parts, and one more; the policy's log standard deviations are clipped to SAC's range;
no updates before the first planned action beyond those of replay's rate; one norm clips all
gradients. The plan knows no end of an episode. Without exploration the action is the mean of the
plan, and the random numbers of planning are always the same; the authors take one of the best
sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dm_env import specs

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.exploration import (
    Counts,
    Policy,
    Sample,
    WarmUp,
    explores,
    initial_counts,
    next_counts,
)
from rlstack.math.returns import symexp, symlog
from rlstack.math.value_distributions import ScaledAtoms, categorical_kl
from rlstack.networks import CriticInput, ensemble
from rlstack.networks.control_model import latent_control
from rlstack.optimizers import Components, OptimizerConfig, component_optimizer
from rlstack.stateful_params import moved_towards
from rlstack.types import (
    Array,
    Batch,
    LearnerOutput,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    StepType,
    TimeStep,
    Trajectory,
    merge_leading_dims,
)


@dataclasses.dataclass(frozen=True)
class TDMPC2Config(Checked):
    """Hyperparameters of TD-MPC2; the number of atoms is the network's (``num_atoms``)."""

    discount: float = 0.99
    """Discount of future rewards, per step. The authors take (L - 5) / L for episodes of L steps,
    within [0.95, 0.995]."""
    horizon: int = 3
    """Actions of a plan, and actions that learning follows in the model."""
    num_samples: int = 512
    """Sequences of actions in each iteration of planning, with those of the policy."""
    num_elites: int = 64
    """Best sequences of an iteration, from which the next one draws."""
    num_policy_trajectories: int = 24
    """Sequences that the policy chooses."""
    iterations: int = 6
    """Iterations of planning. The authors add two for actions of 20 numbers and more."""
    temperature: float = 0.5
    """Factor of the returns in the weights of the best sequences; larger is greedier."""
    min_std: float = 0.05
    """Smallest standard deviation of a plan's actions, which are in [-1, 1]."""
    max_std: float = 2.0
    """Largest standard deviation, which planning begins with."""
    num_critics: int = 5
    """Number of critics. Two of them are drawn for each plan and each update, and for the targets,
    which are the smaller value."""
    max_value: float = 22_025.0
    """Largest absolute value and reward that the atoms represent; they are evenly spaced in symlog
    of it, sign(x) log(1 + |x|). Larger ones count as this one."""
    consistency_cost: float = 20.0
    """Weight of the loss of latent states."""
    reward_cost: float = 0.1
    """Weight of the loss of rewards."""
    value_cost: float = 0.1
    """Weight of the loss of values."""
    entropy_cost: float = 1e-4
    """Weight of the policy's entropy, where values are scaled to a range of about 1."""
    step_decay: float = 0.5
    """rho: the weight of a step in the losses, relative to the step before."""
    target_rate: float = 0.01
    """Fraction by which the target critics, and the range of values, move at each update."""
    random_frames: int = 5_000
    """Number of frames with random actions at the start, in all environments together."""
    max_grad_norm: float = 20.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig(eps=1e-8)
    """Optimizer of all components without their own optimizer."""
    encoder_optimizer: OptimizerConfig | None = None
    """Optimizer of the encoder. None takes optimizer, as for all components; on the command line,
    options not given are those of optimizer."""
    policy_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy; None takes optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "step_decay", "target_rate"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(1, "horizon", "num_samples", "num_elites", "iterations")
        self.require_at_least(0, "num_policy_trajectories", "temperature", "random_frames")
        self.require_at_least(0, "consistency_cost", "reward_cost", "value_cost", "entropy_cost")
        self.require_at_least(0, "max_grad_norm")
        self.require_at_least(2, "num_critics")
        self.require_finite("temperature", "max_value", "max_std", "consistency_cost")
        self.require_finite("reward_cost", "value_cost", "entropy_cost")
        self.require("max_value", self.max_value > 0, "positive")
        most = f"at most num_samples ({self.num_samples})"
        self.require("num_elites", self.num_elites <= self.num_samples, most)
        fits = self.num_policy_trajectories <= self.num_samples
        self.require("num_policy_trajectories", fits, most)
        ordered = 0 < self.min_std <= self.max_std
        self.require("min_std", ordered, f"in (0, max_std], with max_std {self.max_std}")


class TDMPC2Output(NamedTuple):
    """The outputs of acting that learning uses."""

    action: Array  # [B, A] float32, within the spec's bounds


class TDMPC2State(NamedTuple):
    """The acting state; learning does not use it."""

    counts: Counts  # kept from one episode to the next
    plan: Array  # [B, H, A] in [-1, 1], the means of the actions from this step on; 0 at first


class TDMPC2Params(NamedTuple):
    """The params that the learner publishes."""

    model: Params
    policy: Params
    critics: Params  # [N, ...]


class TDMPC2LearnerState(NamedTuple):
    """The learner's state."""

    opt_state: optax.OptState
    target_critics: Params  # [N, ...]
    value_range: Array  # [] float32, moving, at least 1, by which the policy's loss is divided
    rng_key: PRNGKey


class Plan(NamedTuple):
    """What planning found for one row."""

    mean: Array  # [H, A]
    std: Array  # [H, A]
    elite: Array  # [H, A], one of the best sequences, drawn by their weights


def behaviour(cfg: TDMPC2Config, num_envs: int) -> Policy:
    """Returns a policy that samples around the plan, after random actions at the start."""
    return WarmUp(Sample(), cfg.random_frames, num_envs)


@register(TDMPC2Config, network=latent_control, policy=behaviour)
class TDMPC2(Agent):
    """The agent; construct it as `rlstack.agent.Agent` says, with a `LatentControl` network."""

    cfg: TDMPC2Config
    has_priorities = True
    reads_first_state = True

    def __init__(
        self, cfg: TDMPC2Config, obs_spec: PyTree, action_spec: specs.Array, *args: Any
    ) -> None:
        """Checks the action.

        Raises:
          ActionKindError: the action is not continuous with finite bounds.
        """
        self._bounds = distributions.bounds_of(action_spec, type(self).__name__)
        super().__init__(cfg, obs_spec, action_spec, *args)
        self.critics = ensemble(self.network.heads.critic, cfg.num_critics)
        components: Components = {
            ("encoder",): cfg.encoder_optimizer,
            ("policy",): cfg.policy_optimizer,
        }
        self._optimizer = component_optimizer(cfg.optimizer, components, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> TDMPC2Params:
        """Returns newly initialised network parameters."""
        model_key, policy_key, critics_key = jax.random.split(rng_key, 3)
        return TDMPC2Params(
            self.network.init(model_key),
            self.network.heads.policy.init(policy_key),
            self.critics.init(critics_key),
        )

    def initial_learner_state(self, rng_key: PRNGKey, params: TDMPC2Params) -> TDMPC2LearnerState:
        """Returns the optimizer's initial state, with the critics as the target."""
        opt_state = self._optimizer.init(params)
        return TDMPC2LearnerState(opt_state, params.critics, jnp.ones(()), rng_key)

    def initial_state(self, batch_size: int) -> TDMPC2State:
        """Returns counts of 0 and plans of 0, ``[B, ...]``."""
        plan = jnp.zeros((batch_size, self.cfg.horizon, *self.action_spec.shape))
        return TDMPC2State(initial_counts(batch_size), plan)

    def actor_step(
        self, rng_key: PRNGKey, params: TDMPC2Params, timestep: TimeStep, state: TDMPC2State
    ) -> tuple[TDMPC2Output, TDMPC2State]:
        """Plans from ``[B, ...]`` steps, and chooses the actions."""
        plan_key, policy_key = jax.random.split(rng_key)
        plan = self.plan(plan_key, params, timestep, state.plan)
        action = self.policy(policy_key, self._around(plan), state.counts)
        # The next step begins one action later, with nothing known of its last one.
        moved = jnp.concatenate([plan.mean[:, 1:], jnp.zeros_like(plan.mean[:, :1])], axis=1)
        after = TDMPC2State(next_counts(state.counts, timestep), moved)
        return TDMPC2Output(self._bounds.from_unit(action)), after

    def action_distribution(
        self, rng_key: PRNGKey, params: TDMPC2Params, timestep: TimeStep, state: TDMPC2State
    ) -> distributions.Normal:
        """Returns the Gaussian around the plan's first action, in the environment's units."""
        plan_key, _ = jax.random.split(rng_key)
        found = self._around(self.plan(plan_key, params, timestep, state.plan))
        return self._bounds.normal_from_unit(found)

    def _around(self, plan: Plan) -> distributions.Normal:
        """Returns the Gaussian around the first actions of plans ``[B, H, A]``."""
        centre = plan.elite if explores(self.policy) else plan.mean
        return distributions.Normal(centre[:, 0], jnp.log(plan.std[:, 0]))

    def plan(self, rng_key: PRNGKey, params: TDMPC2Params, timestep: TimeStep, mean: Array) -> Plan:
        """Plans from steps ``[B, ...]``, beginning with the means ``[B, H, A]``.

        With the greedy policy the key is not used: the same plan follows from the same step.
        """
        states = self.network.represent(params.model, timestep.observation)
        if explores(self.policy):
            critics_key, rows_key = jax.random.split(rng_key)
            keys = jax.random.split(rows_key, len(states))
        else:
            critics_key = jax.random.PRNGKey(0)
            keys = jnp.broadcast_to(critics_key, (len(states), 2))
        params = params._replace(critics=self.two_of(critics_key, params.critics))
        return jax.vmap(self._plan_row, in_axes=(0, None, 0, 0))(keys, params, states, mean)

    def two_of(self, rng_key: PRNGKey, critics: Params) -> Params:
        """Returns two of the critics ``[N, ...]``, ``[2, ...]``."""
        two = jax.random.permutation(rng_key, self.cfg.num_critics)[:2]
        return jax.tree.map(lambda x: jnp.asarray(x)[two], critics)

    def _plan_row(self, rng_key: PRNGKey, params: TDMPC2Params, state: Array, mean: Array) -> Plan:
        """Plans from one state ``[D]``, beginning with the means ``[H, A]``."""
        cfg = self.cfg
        policy_key, elite_key, loop_key = jax.random.split(rng_key, 3)
        proposed = self._proposed(policy_key, params, state)
        drawn = (cfg.horizon, cfg.num_samples - cfg.num_policy_trajectories, *mean.shape[1:])

        def improve(plan: tuple[Array, Array], key: PRNGKey) -> tuple[Any, tuple[Array, Array]]:
            noise_key, value_key = jax.random.split(key)
            mean, std = plan
            noise = jax.random.normal(noise_key, drawn)
            actions = jnp.clip(mean[:, None] + std[:, None] * noise, -1.0, 1.0)
            actions = jnp.concatenate([proposed, actions], axis=1)
            values = self.value_of(value_key, params, state, actions)
            weights, elites = self.elites(values, actions)
            return self.fitted(weights, elites), (weights, elites)

        start = mean, jnp.full_like(mean, cfg.max_std)
        keys = jax.random.split(loop_key, cfg.iterations)
        (mean, std), found = jax.lax.scan(improve, start, keys)
        weights, elites = (x[-1] for x in found)
        index = jax.random.categorical(elite_key, jnp.log(weights))
        return Plan(mean, std, elites[:, index])

    def elites(self, values: Array, actions: Array) -> tuple[Array, Array]:
        """Returns the weights ``[E]`` and actions ``[H, E, A]`` of the best sequences.

        Args:
          values: ``[S]``, the returns of the sequences; one that is NaN counts as 0.
          actions: ``[H, S, A]``.
        """
        best, index = jax.lax.top_k(jnp.nan_to_num(values), self.cfg.num_elites)
        return jax.nn.softmax(self.cfg.temperature * best), actions[:, index]

    def fitted(self, weights: Array, elites: Array) -> tuple[Array, Array]:
        """Returns mean and deviation ``[H, A]`` of sequences ``[H, E, A]`` by weights ``[E]``."""
        mean = (weights[:, None] * elites).sum(1)
        variance = (weights[:, None] * jnp.square(elites - mean[:, None])).sum(1)
        return mean, jnp.clip(jnp.sqrt(variance), self.cfg.min_std, self.cfg.max_std)

    def _proposed(self, rng_key: PRNGKey, params: TDMPC2Params, state: Array) -> Array:
        """Returns sequences that the policy draws from a state ``[D]``, ``[H, P, A]``."""
        rows = jnp.broadcast_to(state, (self.cfg.num_policy_trajectories, *state.shape))

        def step(states: Any, key: Any) -> tuple[Any, Array]:
            action = self.policy_of(params.policy, states).sample(key)
            return self.network.step(params.model, states, action)[0], action

        return jax.lax.scan(step, rows, jax.random.split(rng_key, self.cfg.horizon))[1]

    def value_of(
        self, rng_key: PRNGKey, params: TDMPC2Params, state: Array, actions: Array
    ) -> Array:
        """Returns the predicted returns ``[S]`` of sequences ``[H, S, A]`` from a state ``[D]``.

        They end with the critics' mean value of an action of the policy.
        """

        def step(states: Any, action: Any) -> tuple[Any, Array]:
            after, reward = self.network.step(params.model, states, action)
            return after, self.atoms.mean(reward)

        rows = jnp.broadcast_to(state, (actions.shape[1], *state.shape))
        states, rewards = jax.lax.scan(step, rows, actions)
        action = self.policy_of(params.policy, states).sample(rng_key)
        value = self.atoms.mean(self.values_of(params.critics, states, action)).mean(-1)
        discounts = self.cfg.discount ** jnp.arange(len(actions))
        return discounts @ rewards + self.cfg.discount ** len(actions) * value

    def policy_of(self, policy: Params, states: Array) -> distributions.TanhNormal:
        """Returns the policy in latent states ``[..., D]``; its actions are in [-1, 1]."""
        flat = _timestep(states.reshape((-1, states.shape[-1])))
        parameters, _ = self.network.heads.policy.apply(None, policy, flat, ())
        parameters = parameters.reshape((*states.shape[:-1], parameters.shape[-1]))
        unit = self._bounds.unit_spec()
        found = distributions.from_parameters(unit, parameters, squash=True)
        assert isinstance(found, distributions.TanhNormal)
        return found

    def values_of(self, critics: Params, states: Array, actions: Array) -> Array:
        """Returns the logits of each critic's value in states ``[..., D]``, ``[..., C, N]``."""
        flat = (x.reshape((-1, x.shape[-1])) for x in (states, actions))
        outputs, _ = self.critics.apply(None, critics, _timestep(CriticInput(*flat)), ())
        return outputs.reshape((*states.shape[:-1], *outputs.shape[1:]))

    def learner_step(
        self, params: TDMPC2Params, learner_state: TDMPC2LearnerState, batch: Batch
    ) -> tuple[TDMPC2Params, TDMPC2LearnerState, LearnerOutput]:
        """Learns from one batch, and moves the range of values towards that of the batch."""
        params, learner_state, output = super().learner_step(params, learner_state, batch)
        found, old = output.logs["value_range"], learner_state.value_range
        moved = old + self.cfg.target_rate * (found - old)
        return params, learner_state._replace(value_range=moved), output

    def compute_gradients(
        self, params: TDMPC2Params, learner_state: TDMPC2LearnerState, batch: Batch
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of `loss`, its logs, and the model's losses as priorities."""
        grads, (logs, priorities) = jax.grad(self.loss, has_aux=True)(params, learner_state, batch)
        return grads, LearnerOutput({**logs, "grad_norm": optax.tree.norm(grads)}, priorities)

    def loss(
        self, params: TDMPC2Params, learner_state: TDMPC2LearnerState, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the losses of model and policy, (logs, priorities ``[B]``).

        The paper's equations 3 and 4. The model's loss of an item is the sum of consistency, reward
        and value losses with their costs, each a mean over ``horizon`` steps with the weights
        rho^t, and the value's also over critics. It is the item's priority.

        Raises:
          ValueError: an item has fewer than ``horizon`` transitions.
        """
        cfg, horizon = self.cfg, self.cfg.horizon
        trajectory, valid = self.followed(batch.trajectory)
        _, subset_key, target_key, policy_key = jax.random.split(learner_state.rng_key, 4)
        observed, target = self.targets(
            (subset_key, target_key), params, learner_state.target_critics, trajectory
        )
        actions = self._bounds.to_unit(trajectory.agent_output.action[:-1])
        states, rewards = self.unrolled(params, trajectory, actions)
        taken = self.values_of(params.critics, states[:-1], actions)
        weights = cfg.step_decay ** jnp.arange(horizon)[:, None] / horizon

        def added(errors: Array) -> jax.Array:
            return jnp.where(valid, weights * errors, 0.0).sum(axis=0)  # [B]

        consistency = added(jnp.square(states[1:] - observed).mean(-1))
        wanted = self.atoms.probs(trajectory.timestep.reward[1:], rewards)
        reward_loss = added(categorical_kl(wanted, rewards))
        probs = self.atoms.probs(target, taken)[..., None, :]
        value_loss = added(categorical_kl(probs, taken).mean(-1))
        priorities = cfg.consistency_cost * consistency
        priorities += cfg.reward_cost * reward_loss + cfg.value_cost * value_loss

        fixed = jax.lax.stop_gradient(states)
        # Where an action was taken, and the last state that was reached.
        acts = jnp.concatenate([valid, valid[-1:]])
        of_policy, policy_logs = self.policy_loss(
            policy_key, params, learner_state.value_range, fixed, acts
        )
        loss = jnp.mean(batch.weights * priorities) + of_policy
        logs: Logs = {
            "loss": loss,
            "consistency_loss": consistency.mean(),
            "reward_loss": reward_loss.mean(),
            "value_loss": value_loss.mean(),
            "value": jnp.mean(self.atoms.mean(taken)),
            **policy_logs,
        }
        # Where prediction and target agree, rounding can make a divergence negative.
        return loss, (logs, jax.lax.stop_gradient(jnp.maximum(priorities, 0.0)))

    def followed(self, trajectory: Trajectory) -> tuple[Trajectory, Array]:
        """Returns the steps ``[H + 1, B, ...]`` that learning follows, and where, ``[H, B]`` bool.

        A transition counts if it and those before it are within one episode.

        Raises:
          ValueError: an item has fewer than ``horizon`` transitions.
        """
        horizon, length = self.cfg.horizon, trajectory.timestep.step_type.shape[0] - 1
        if length < horizon:
            raise ValueError(
                f"TDMPC2: horizon ({horizon}) must be at most the item's {length} transitions. "
                f"Use --replay.unroll-length {horizon}, or a smaller --agent.horizon."
            )
        kept = trajectory._replace(agent_state=())  # replay may have it at the first step only
        kept = jax.tree.map(lambda x: x[: horizon + 1], kept)
        broken = kept.timestep.last()[:-1] | kept.timestep.first()[1:]
        return kept, jnp.cumsum(broken, axis=0) == 0

    def targets(
        self,
        keys: tuple[PRNGKey, PRNGKey],
        params: TDMPC2Params,
        target_critics: Params,
        trajectory: Trajectory,
    ) -> tuple[Array, Array]:
        """Returns what the model should predict, without gradients.

        Args:
          keys: keys for the choice of two critics, and for the policy's actions.
          params: the params.
          target_critics: the params of the target critics.
          trajectory: ``[H + 1, B, ...]``.

        Returns:
          The latent states ``[H, B, D]`` after each transition, and the values ``[H, B]`` of the
          actions: the reward and the smaller discounted value of two target critics.
        """
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        rows = merge_leading_dims(after.observation)
        states = self.network.represent(params.model, rows)
        states = states.reshape((*after.reward.shape, -1))
        action = self.policy_of(params.policy, states).sample(keys[1])
        critics = self.two_of(keys[0], target_critics)
        value = self.atoms.mean(self.values_of(critics, states, action)).min(-1)
        target = after.reward + after.discount * self.cfg.discount * value
        return jax.lax.stop_gradient((states, target))

    def unrolled(
        self, params: TDMPC2Params, trajectory: Trajectory, actions: Array
    ) -> tuple[Array, Array]:
        """Follows actions ``[H, B, A]`` in the model from the first steps of items.

        Returns:
          Latent states ``[H + 1, B, D]`` and logits of rewards ``[H, B, N]``.
        """
        first = jax.tree.map(lambda x: x[0], trajectory.timestep.observation)

        def step(state: Any, action: Any) -> tuple[Any, tuple[Array, Array]]:
            after, reward = self.network.step(params.model, state, action)
            return after, (after, reward)

        state = self.network.represent(params.model, first)
        _, (states, rewards) = jax.lax.scan(step, state, actions)
        return jnp.concatenate([state[None], states]), rewards

    def policy_loss(
        self, rng_key: PRNGKey, params: TDMPC2Params, value_range: Array, states: Array, acts: Array
    ) -> tuple[Array, Logs]:
        """Returns the policy's loss in latent states ``[H + 1, B, D]``, and its logs.

        Among them is ``value_range``, the distance of the 5th to the 95th percentile of the values
        in the first states, at least 1.

        Args:
          rng_key: a key for the policy's actions and for two critics.
          params: the params; only the policy's get a gradient.
          value_range: what values are divided by, [].
          states: latent states, without gradient.
          acts: ``[H + 1, B]`` bool, the states that count.
        """
        horizon = self.cfg.horizon
        critics_key, action_key = jax.random.split(rng_key)
        action, log_prob = self.policy_of(params.policy, states).sample_and_log_prob(action_key)
        critics = jax.lax.stop_gradient(self.two_of(critics_key, params.critics))
        value = self.atoms.mean(self.values_of(critics, states, action)).mean(-1)  # [H + 1, B]
        scaled = value / jnp.maximum(value_range, 1.0) - self.cfg.entropy_cost * log_prob
        weights = self.cfg.step_decay ** jnp.arange(horizon + 1)[:, None] / (horizon + 1)
        loss = -jnp.where(acts, weights * scaled, 0.0).sum(axis=0).mean()
        low, high = jnp.percentile(jax.lax.stop_gradient(value[0]), jnp.array([5.0, 95.0]))
        logs: Logs = {
            "policy_loss": loss,
            "entropy": -jnp.mean(log_prob),
            "value_range": jnp.maximum(high - low, 1.0),
        }
        return loss, logs

    @property
    def atoms(self) -> ScaledAtoms:
        """The atoms of rewards and values."""
        return ScaledAtoms(symlog, symexp, self.cfg.max_value)

    def update_learner_state(
        self, params: TDMPC2Params, learner_state: TDMPC2LearnerState, opt_state: optax.OptState
    ) -> TDMPC2LearnerState:
        """Stores the optimizer's state, and updates the target critics and the key."""
        old = learner_state.target_critics
        return learner_state._replace(
            opt_state=opt_state,
            target_critics=moved_towards(params.critics, old, self.cfg.target_rate),
            rng_key=jax.random.split(learner_state.rng_key, 4)[0],
        )


def _timestep(observation: PyTree) -> TimeStep:
    """Returns steps in the middle of episodes with observations ``[B, ...]``."""
    leaf = jax.tree.leaves(observation)[0]
    zeros = jnp.zeros(len(leaf))
    return TimeStep(jnp.full(len(leaf), StepType.MID, jnp.int32), zeros, zeros + 1, observation)
