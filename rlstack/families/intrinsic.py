"""A wrapper that adds a bonus for new observations to the rewards of any agent.

The bonus of a transition is the novelty of the observation that it leads to:

- ``rnd``: random network distillation, Burda et al. (2019), https://arxiv.org/abs/1810.12894. A
  predictor learns the outputs of a random network on standardised observations, and its error is
  the bonus. It falls over the run for what is seen often.
- ``episodic``: the distance to the nearest earlier observations of the same episode, Badia et al.
  (2020), https://arxiv.org/abs/2002.06038, see `rlstack.math.episodic_novelty`. The embedding is
  one fixed random projection of the observation, instead of inverse dynamics.
- ``ngu``: both, as in that paper (equation 1): the episodic bonus times the modulator
  ``1 + (error - mean error) / standard deviation of errors``, clipped to 1 and 5.

It is divided by the running standard deviation of its discounted sum. Batches of a replay have no
order, so the sum goes through the rows of a batch one after another, and through one batch after
another. With whole unrolls these are sums along episodes, as in Burda's program.

Agents that learn a policy in epochs (PPO, V-MPO and theirs) get two streams: the bonus has a value
of its own, whose discount and trace do not stop where an episode ends, and the advantage is the
weighted sum of both. For other agents the bonus is added to the rewards of each batch, with the
newest predictor.

All this is in the learner's state: params are those of the wrapped agent, and so are what acts, is
evaluated and is exported. Only the memory of the episode is acting state, which replay keeps with
each step.

Deviations: statistics begin with the first batch instead of steps at random; the value has a torso
of its own, which sees what the predictor sees.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from rlstack.agent import Agent, EpochAgent
from rlstack.checks import Checked
from rlstack.configs.network import NetworkConfig, Torso
from rlstack.families.epochs import EpochPolicyGradient
from rlstack.families.policy_gradient import masked_mean
from rlstack.families.two_streams import (
    StreamRows,
    TwoStreams,
    network_outputs,
    require_arrays,
)
from rlstack.families.wrapped import Wrapped
from rlstack.math import returns
from rlstack.math.episodic_novelty import (
    EpisodicMemory,
    emptied,
    episodic_novelty,
    initial_memory,
)
from rlstack.math.recurrences import in_parallel
from rlstack.math.running_statistics import (
    RunningStatistics,
    initial_statistics,
    normalise,
    update_statistics,
)
from rlstack.networks import observation_features
from rlstack.networks.novelty import novelty_networks
from rlstack.optimizers import OptimizerConfig, component_optimizer, optimizer_step
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    Batch,
    LearnerOutput,
    LearnerState,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Trajectory,
)

_CLIP = 5.0  # of standardised observations (Burda et al., section 2.4)
_LARGEST_MODULATOR = 5.0  # L of Badia et al., equation 1
_SCALAR = specs.Array((), "float32")


@dataclasses.dataclass(frozen=True)
class IntrinsicConfig(Checked):
    """Hyperparameters of the bonus, for the config of an agent with one."""

    bonus: Literal["rnd", "episodic", "ngu"] = "rnd"
    """Which observations get a bonus. rnd: those that are rare in the run. episodic: those that
    differ from the earlier ones of the episode. ngu: both."""
    intrinsic_weight: float = 1.0
    """Factor on the bonus. In PPO it multiplies the advantage of the bonus."""
    extrinsic_weight: float = 1.0
    """Factor on the environment's rewards. In PPO it multiplies their advantage. With 0 the agent
    learns from the bonus alone."""
    intrinsic_discount: float = 0.99
    """Discount of the bonus in its value and in the sum that scales it."""
    predictor_share: float = 1.0
    """Share of a batch's steps that the predictor learns from, drawn at random. Burda et al. lower
    it to 0.25 for 128 environments, so that the bonus does not vanish sooner than with 32."""
    novelty_torso: Torso = "mlp"
    """Layers of the predictor, of the random network and of the bonus's value; see
    network.torso."""
    novelty_sizes: tuple[int, ...] = (64, 64)
    """Sizes of their dense layers."""
    embedding_size: int = 64
    """Number of outputs of the random network (the paper's 512)."""
    predictor: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    """Optimizer of the predictor and of the bonus's value."""
    memory_size: int = 256
    """Observations of an episode that episodic bonuses are compared with, the newest. Replay keeps
    the memory with every step."""
    memory_width: int = 16
    """Size of the random projection of an observation in that memory."""
    num_neighbours: int = 10
    """Nearest observations that count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "intrinsic_weight", "extrinsic_weight")
        discount = self.intrinsic_discount
        self.require("intrinsic_discount", 0 <= discount <= 1, "in [0, 1]")
        self.require("predictor_share", 0 < self.predictor_share <= 1, "in (0, 1]")
        self.require_at_least(1, "embedding_size", "memory_width", "num_neighbours")
        enough = self.memory_size >= self.num_neighbours
        self.require("memory_size", enough, f"at least num_neighbours ({self.num_neighbours})")


class Learned(NamedTuple):
    """The params that are learned."""

    predictor: Params
    value: Params  # () without a value of the bonus


class NoveltyState(NamedTuple):
    """What measures novelty, in the learner's state."""

    target: Params  # of the random network
    learned: Learned
    opt_state: optax.OptState
    observation: RunningStatistics
    errors: RunningStatistics  # of the predictor, for ngu
    sums: RunningStatistics  # of the discounted sums of the bonus
    discounted_sum: Array  # [] float32, the last of them
    rng_key: PRNGKey


class IntrinsicLearnerState(NamedTuple):
    """The learner's state."""

    agent: LearnerState
    novelty: NoveltyState


class EpisodicState(NamedTuple):
    """The acting state with an episodic bonus."""

    agent: AgentState
    memory: EpisodicMemory


class NovelOutput(NamedTuple):
    """The outputs of acting with an episodic bonus."""

    action: PyTree  # [B, ...]
    agent: AgentOut  # the other outputs of the agent
    novelty: Array  # [B] float32, of the observation that was acted on


class NoveltyRows(NamedTuple):
    """Transitions to learn from, ``[N, ...]`` as the agent's rows."""

    before: PyTree  # standardised observations
    after: PyTree
    features: Array  # [N, E], of the random network for `after`
    present: Array  # [N] bool, False where there is no transition
    bonus: Array  # [N] float32
    target: Any = ()  # [N] float32, of the bonus's value


class Intrinsic(Wrapped):
    """An agent that learns from its rewards and from a bonus."""

    def __init__(self, agent: Agent, cfg: IntrinsicConfig) -> None:
        """Wraps an agent. Call `intrinsic` instead, which chooses the class.

        Raises:
          ValueError: observations are of entities, or do not fit the torso.
        """
        super().__init__(agent, cfg)
        self.intrinsic = cfg
        require_arrays("IntrinsicConfig", agent, "a bonus")
        self._spec = jax.tree.map(_as_float_spec, agent.obs_spec)
        network = NetworkConfig(
            torso=cfg.novelty_torso, hidden_sizes=cfg.novelty_sizes, activation="relu"
        )
        self._networks = novelty_networks(self._spec, network, cfg.embedding_size)
        self._optimizer = component_optimizer(cfg.predictor, {}, 0.0)
        self._has_value = isinstance(agent, EpochPolicyGradient)
        self._remembers = cfg.bonus != "rnd"

    def lay_out(self, timestep: TimeStep) -> TimeStep:
        """Returns the steps unchanged: only the agent's own observations can be laid out."""
        return timestep

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> IntrinsicLearnerState:
        """Returns the agent's initial state, random networks and empty statistics."""
        agent_key, target_key, predictor_key, value_key, rng_key = jax.random.split(rng_key, 5)
        value = self._networks.value.init(value_key) if self._has_value else ()
        learned = Learned(self._networks.predictor.init(predictor_key), value)
        novelty = NoveltyState(
            target=self._networks.target.init(target_key),
            learned=learned,
            opt_state=self._optimizer.init(learned),
            observation=initial_statistics(self._spec),
            errors=initial_statistics(_SCALAR),
            sums=initial_statistics(_SCALAR),
            discounted_sum=jnp.zeros(()),
            rng_key=rng_key,
        )
        return IntrinsicLearnerState(self.agent.initial_learner_state(agent_key, params), novelty)

    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the agent's initial state, with empty memories for an episodic bonus."""
        state, cfg = self.agent.initial_state(batch_size), self.intrinsic
        if not self._remembers:
            return state
        return EpisodicState(state, initial_memory(batch_size, cfg.memory_size, cfg.memory_width))

    def reset_state(self, state: AgentState, first: Array) -> AgentState:
        """Resets the agent's state, and empties the memories where episodes begin."""
        if not self._remembers:
            return self.agent.reset_state(state, first)
        return EpisodicState(
            self.agent.reset_state(state.agent, first), emptied(state.memory, first)
        )

    def read_once(self, state: AgentState) -> PyTree:
        """Returns what the agent says of its state; learning reads no memories."""
        if not self._remembers:
            return self.agent.read_once(state)
        memory = jax.tree.map(lambda _: True, state.memory)
        return EpisodicState(self.agent.read_once(state.agent), memory)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> ActionDistribution | None:
        """Returns the agent's distribution."""
        state = state.agent if self._remembers else state
        return self.agent.action_distribution(rng_key, params, timestep, state)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Acts as the agent on ``[B, ...]`` steps, and for an episodic bonus remembers them."""
        if not self._remembers:
            return self.agent.actor_step(rng_key, params, timestep, state)
        output, agent_state = self.agent.actor_step(rng_key, params, timestep, state.agent)
        novelty, memory = episodic_novelty(
            state.memory, self.embedding(timestep.observation), self.intrinsic.num_neighbours
        )
        output = NovelOutput(output.action, output._replace(action=()), novelty)
        return output, EpisodicState(agent_state, memory)

    def embedding(self, observation: PyTree) -> Array:
        """Returns the random projection ``[B, memory_width]``; it is the same in every run."""
        features = observation_features(
            self.obs_spec, observation, scale_pixels=False, image_axes="dense"
        )
        features = features.reshape((features.shape[0], -1))
        shape = features.shape[1], self.intrinsic.memory_width
        return features @ np.random.default_rng(0).standard_normal(shape, np.float32)

    def learner_step(
        self, params: Params, learner_state: IntrinsicLearnerState, batch: Batch
    ) -> tuple[Params, IntrinsicLearnerState, LearnerOutput]:
        """Updates the agent by rewards and bonus, and then the predictor."""
        novelty, batch, rows = self._rewarded(learner_state.novelty, batch)
        params, state, output = self.agent.learner_step(params, learner_state.agent, batch)
        novelty, logs = self.learn_stream(novelty, rows)
        logs = {**output.logs, **logs, **_logs_of(rows)}
        return params, IntrinsicLearnerState(state, novelty), output._replace(logs=logs)

    def _rewarded(
        self, state: NoveltyState, batch: Batch
    ) -> tuple[NoveltyState, Batch, NoveltyRows]:
        """Returns the batch with the bonus added to its rewards; see `_measured`."""
        state, batch, rows = self._measured(state, batch)
        timestep, cfg = batch.trajectory.timestep, self.intrinsic
        reward = cfg.extrinsic_weight * timestep.reward[1:] + cfg.intrinsic_weight * rows.bonus
        reward = jnp.concatenate([timestep.reward[:1], reward])
        return state, _with_steps(batch, timestep._replace(reward=reward)), rows

    def _measured(
        self, state: NoveltyState, batch: Batch
    ) -> tuple[NoveltyState, Batch, NoveltyRows]:
        """Returns the state with the batch in its statistics, the agent's batch, and the bonus.

        The rows are ``[T, B, ...]``.
        """
        cfg, trajectory = self.intrinsic, batch.trajectory
        present = ~jnp.asarray(trajectory.timestep.first())[1:]
        observation = jax.tree.map(_as_float, self.obs_spec, trajectory.timestep.observation)
        after = jax.tree.map(lambda x: x[1:], observation)
        statistics = update_statistics(state.observation, after, present)
        seen = normalise(statistics, observation, _CLIP)
        before, after = (jax.tree.map(lambda x, s=s: x[s], seen) for s in (_BEFORE, _AFTER))
        features = network_outputs(self._networks.target, state.target, after, present.shape)
        predicted = network_outputs(
            self._networks.predictor, state.learned.predictor, after, present.shape
        )
        amount = jnp.square(predicted - features).mean(-1)
        errors = update_statistics(state.errors, amount, present)
        if self._remembers:
            output = trajectory.agent_output
            modulator = 1 + (amount - errors.mean[0]) / jnp.sqrt(errors.variance[0] + 1e-12)
            amount = jnp.asarray(output.novelty)[1:]
            if cfg.bonus == "ngu":
                amount = amount * jnp.clip(modulator, 1.0, _LARGEST_MODULATOR)
            trajectory = self._own(trajectory)
        amount = jnp.where(present, amount, 0.0)
        added = discounted_sums(state.discounted_sum, amount, present, cfg.intrinsic_discount)
        sums = update_statistics(state.sums, added, present)
        bonus = amount * jax.lax.rsqrt(jnp.maximum(sums.variance[0], 1e-12))
        state = state._replace(
            observation=statistics, errors=errors, sums=sums, discounted_sum=added[-1, -1]
        )
        rows = NoveltyRows(before, after, features, present, bonus)
        return state, batch._replace(trajectory=trajectory), rows

    def trajectory_values(self, params: Params, trajectory: Trajectory) -> Array:
        """Returns the agent's values."""
        return self.agent.trajectory_values(params, self._own(trajectory))

    def _own(self, trajectory: Trajectory) -> Trajectory:
        """Returns the agent's own part of a trajectory."""
        if not self._remembers:
            return trajectory
        output = trajectory.agent_output
        return trajectory._replace(
            agent_output=output.agent._replace(action=output.action),
            agent_state=trajectory.agent_state.agent,
        )

    def learn_stream(self, state: NoveltyState, rows: NoveltyRows) -> tuple[NoveltyState, Logs]:
        """Makes a gradient step of the predictor and of the bonus's value."""
        draw_key, rng_key = jax.random.split(state.rng_key)
        leading = rows.present.shape
        chosen = jax.random.uniform(draw_key, leading) < self.intrinsic.predictor_share

        def loss(learned: Learned) -> tuple[Array, Logs]:
            predicted = network_outputs(
                self._networks.predictor, learned.predictor, rows.after, leading
            )
            errors = jnp.square(predicted - rows.features).mean(-1)
            total = masked_mean(errors, rows.present & chosen)
            logs: Logs = {"predictor_loss": total}
            if self._has_value:
                value = network_outputs(self._networks.value, learned.value, rows.before, leading)
                value_loss = 0.5 * jnp.square(value - rows.target).mean()
                total, logs["intrinsic_value_loss"] = total + value_loss, value_loss
            return total, logs

        grads, logs = jax.grad(loss, has_aux=True)(state.learned)
        learned, opt_state, _ = optimizer_step(
            self._optimizer, state.learned, state.opt_state, grads
        )
        state = state._replace(learned=learned, opt_state=opt_state, rng_key=rng_key)
        return state, logs


class IntrinsicEpochs(Intrinsic, TwoStreams):
    """An epoch agent with a bonus, which is measured once per batch."""

    def prepare(
        self, params: Params, learner_state: IntrinsicLearnerState, batch: Batch
    ) -> tuple[IntrinsicLearnerState, PyTree, Array]:
        """Calls the agent's ``prepare``, and adds the advantage of the bonus to its rows.

        An agent without advantages learns from rewards with the bonus, and the predictor makes its
        step here.
        """
        if not self._has_value:
            novelty, batch, rows = self._rewarded(learner_state.novelty, batch)
            novelty, _ = self.learn_stream(novelty, rows)
            state, agent_rows, schedule = self.agent.prepare(params, learner_state.agent, batch)
            return IntrinsicLearnerState(state, novelty), StreamRows(agent_rows, ()), schedule
        novelty, batch, rows = self._measured(learner_state.novelty, batch)
        state, agent_rows, schedule = self.agent.prepare(params, learner_state.agent, batch)
        advantage, target = self._advantage(novelty, batch, rows)
        weights = self.intrinsic.extrinsic_weight, self.intrinsic.intrinsic_weight
        joined = self.join(agent_rows, rows._replace(target=target), advantage, weights)
        return IntrinsicLearnerState(state, novelty), joined, schedule

    def _advantage(
        self, state: NoveltyState, batch: Batch, rows: NoveltyRows
    ) -> tuple[Array, Array]:
        """Returns the advantage of the bonus and the target of its value, each ``[T, B]``.

        The last step of an episode and the first of the next are one state here, with one value.
        """
        observation = jax.tree.map(
            lambda x, y: jnp.concatenate([x[:1], y]), rows.before, rows.after
        )
        leading = batch.trajectory.timestep.step_type.shape
        values = network_outputs(self._networks.value, state.learned.value, observation, leading)
        values = jnp.concatenate([jnp.where(rows.present, values[:-1], values[1:]), values[-1:]])
        return returns.gae(
            rewards=rows.bonus,
            discounts=jnp.where(rows.present, self.intrinsic.intrinsic_discount, 1.0),
            values=values,
            gae_lambda=jnp.where(rows.present, self.agent.cfg.gae_lambda, 1.0),
            mask=jnp.ones_like(rows.present),
        )

    def batch_logs(self, rows: StreamRows) -> Logs:
        """Returns the agent's logs and the mean bonus."""
        logs = super().batch_logs(rows)
        return {**logs, **_logs_of(rows.own)} if self._has_value else logs

    learner_step = EpochAgent.learner_step


def intrinsic(agent: Agent, cfg: IntrinsicConfig) -> Agent:
    """Returns the agent with a bonus.

    Args:
      agent: an agent that learns from rewards.
      cfg: the options of the bonus.

    Raises:
      ValueError: observations are of entities, or do not fit the torso.
    """
    return IntrinsicEpochs(agent, cfg) if isinstance(agent, EpochAgent) else Intrinsic(agent, cfg)


def discounted_sums(start: Array, amounts: Array, present: Array, discount: float) -> Array:
    """Returns ``sum = discount * previous sum + amount`` at each transition, ``[T, B]``.

    The rows follow one another: row b begins with the last sum of row b - 1.

    Args:
      start: [], the sum before the first row.
      amounts: ``[T, B]``.
      present: ``[T, B]`` bool; where it is False the sum stays as it is.
      discount: factor per transition.
    """
    factors = jnp.where(present, discount, 1.0).T.reshape(-1)
    amounts = jnp.where(present, amounts, 0.0).T.reshape(-1)
    sums = in_parallel(factors, amounts.at[0].add(factors[0] * start))
    return sums.reshape(present.shape[::-1]).T


_BEFORE, _AFTER = slice(None, -1), slice(1, None)


def _logs_of(rows: NoveltyRows) -> Logs:
    return {"intrinsic_reward": masked_mean(rows.bonus, rows.present)}


def _with_steps(batch: Batch, timestep: TimeStep) -> Batch:
    return batch._replace(trajectory=batch.trajectory._replace(timestep=timestep))


def _is_picture(spec: specs.Array) -> bool:
    return spec.dtype == np.uint8 and len(spec.shape) == 3


def _as_float_spec(spec: specs.Array) -> specs.Array:
    """Returns the spec of an entry that is standardised: pictures are too."""
    return specs.Array(spec.shape, np.float32) if _is_picture(spec) else spec


def _as_float(spec: specs.Array, x: Array) -> Array:
    return jnp.asarray(x, jnp.float32) if _is_picture(spec) else jnp.asarray(x)
