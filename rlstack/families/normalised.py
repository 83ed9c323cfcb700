"""A wrapper that standardises observations and scales rewards for any agent.

The statistics are part of the published params. They change only between updates. So all
minibatches of an update use the same normalisation as the acting that produced their
log-probabilities, and evaluation uses the newest statistics of acting. The wrapped agent needs no
change.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from dm_env import specs

from rlstack.agent import Agent, EpochAgent
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.families.wrapped import Wrapped, WrappedEpochs
from rlstack.math.running_statistics import (
    RunningStatistics,
    initial_statistics,
    normalise,
    update_statistics,
)
from rlstack.networks import Standardiser
from rlstack.networks.torsos import action_mask
from rlstack.specs import ACTION_MASK
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    Batch,
    LearnerOutput,
    LearnerState,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Trajectory,
)


class Statistics(NamedTuple):
    """Running statistics of observations and rewards."""

    observation: Any  # a RunningStatistics, or those of the network's Standardiser
    reward: RunningStatistics  # statistics of rewards, or of discounted returns
    largest: Any = ()  # [] float32, the largest size of a discounted return; () without a limit


class NormalisedParams(NamedTuple):
    """The params that the learner publishes."""

    agent: Params
    statistics: Statistics


class NormalisedLearnerState(NamedTuple):
    """The learner's state."""

    agent: LearnerState
    pending: Statistics  # added to the params after the update


class NormalisedState(NamedTuple):
    """The acting state when discounted returns are computed."""

    agent: AgentState
    discounted_return: Array  # [B] float32, of the episode up to the previous step


class Normalised(Wrapped):
    """An agent with normalised observations and rewards."""

    def __init__(self, agent: Agent, cfg: NormalisationConfig) -> None:
        """Wraps an agent. Call `normalised` instead, which chooses the class."""
        super().__init__(agent, cfg)
        self.normalisation = cfg
        self._counts_returns = cfg.rewards == "return"
        # Values of centred rewards have no equivalent in units of the environment's rewards.
        self.has_values = agent.has_values and cfg.rewards != "centred"
        own = getattr(agent.network, "standardiser", None)
        self._standardiser = own or _by_entry(agent.obs_spec)
        self._discount = self._discount_of_returns() if self._counts_returns else 0.0

    def _discount_of_returns(self) -> Any:
        own = self.normalisation.return_discount
        found = getattr(self.agent.cfg, "discount", None) if own is None else own
        if found is None:
            raise ValueError(
                "NormalisationConfig: return_discount must be given with rewards=return if the "
                f"agent has no discount, such as {type(self.agent).__name__}; got None. Add "
                "--normalisation.return-discount."
            )
        return found

    def read_once(self, state: AgentState) -> PyTree:
        """Returns what the agent says of its state; discounted returns are read at each step."""
        if not self._counts_returns:
            return self.agent.read_once(state)
        return NormalisedState(self.agent.read_once(state.agent), False)  # type: ignore[arg-type]

    def initial_params(self, rng_key: PRNGKey) -> NormalisedParams:
        """Returns the agent's newly initialised parameters, and empty statistics."""
        largest = jnp.zeros(()) if self.normalisation.return_limit else ()
        statistics = Statistics(self._standardiser.initial(), initial_statistics(_SCALAR), largest)
        return NormalisedParams(self.agent.initial_params(rng_key), statistics)

    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the agent's initial state, with discounted returns of 0 if they are computed."""
        state = self.agent.initial_state(batch_size)
        return NormalisedState(state, jnp.zeros(batch_size)) if self._counts_returns else state

    def reset_state(self, state: AgentState, first: Array) -> AgentState:
        """Resets the agent's state and the discounted returns of these rows."""
        if not self._counts_returns:
            return self.agent.reset_state(state, first)
        return NormalisedState(
            self.agent.reset_state(state.agent, first), jnp.where(first, 0, state.discounted_return)
        )

    def initial_learner_state(
        self, rng_key: PRNGKey, params: NormalisedParams
    ) -> NormalisedLearnerState:
        """Returns the agent's initial learner state, with empty statistics."""
        state = self.agent.initial_learner_state(rng_key, params.agent)
        return NormalisedLearnerState(state, params.statistics)

    def action_distribution(
        self, rng_key: PRNGKey, params: NormalisedParams, timestep: TimeStep, state: AgentState
    ) -> ActionDistribution | None:
        """Returns the agent's distribution for normalised steps."""
        seen = self._seen(params.statistics, timestep)
        state = state.agent if self._counts_returns else state
        return self.agent.action_distribution(rng_key, params.agent, seen, state)

    def actor_step(
        self, rng_key: PRNGKey, params: NormalisedParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Calls the agent's ``actor_step`` with normalised steps ``[B, ...]``."""
        seen = self._seen(params.statistics, timestep)
        if not self._counts_returns:
            return self.agent.actor_step(rng_key, params.agent, seen, state)
        output, agent_state = self.agent.actor_step(rng_key, params.agent, seen, state.agent)
        return output, NormalisedState(agent_state, self._returns(state, timestep))

    def trajectory_values(self, params: NormalisedParams, trajectory: Trajectory) -> Array:
        """Returns the agent's values in units of the environment's rewards, without clipping."""
        if self._counts_returns:
            trajectory = trajectory._replace(agent_state=trajectory.agent_state.agent)
        seen = trajectory._replace(timestep=self._seen(params.statistics, trajectory.timestep))
        return self.agent.trajectory_values(params.agent, seen) / self._scale(params.statistics)

    def learner_step(
        self, params: NormalisedParams, learner_state: NormalisedLearnerState, batch: Batch
    ) -> tuple[NormalisedParams, NormalisedLearnerState, LearnerOutput]:
        """Updates the agent from the normalised batch, then adds the batch to the statistics."""
        learner_state, batch = self._take(params, learner_state, batch)
        agent_params, agent_state, output = self.agent.learner_step(
            params.agent, learner_state.agent, batch
        )
        params = NormalisedParams(agent_params, learner_state.pending)
        return params, learner_state._replace(agent=agent_state), output

    def _take(
        self, params: NormalisedParams, learner_state: NormalisedLearnerState, batch: Batch
    ) -> tuple[NormalisedLearnerState, Batch]:
        """Returns the learner state with this batch in its statistics, and the normalised batch.

        The last step of an item is the first of the next, so the statistics take observations of
        all steps but the last, on which the agent acts, and rewards of all but the first. An item
        that begins at the last step of an episode is not drawn, so its reward is only there.
        """
        trajectory, pending = batch.trajectory, learner_state.pending
        if self.normalisation.observations:
            seen = jax.tree.map(lambda x: x[:-1], trajectory.timestep.observation)
            first = jnp.asarray(trajectory.timestep.first())
            present = ~(first[:-1] & first[1:])  # FIRST before FIRST is of no episode
            observation = self._standardiser.update(pending.observation, seen, present)
            pending = pending._replace(observation=observation)
        if self.normalisation.rewards != "none":
            after = jax.tree.map(lambda x: x[1:], trajectory)
            amount = after.timestep.reward
            if self._counts_returns:
                amount = self._returns(after.agent_state, after.timestep)
            # The first step of an episode has no reward.
            rewarded = ~after.timestep.first()
            reward = update_statistics(pending.reward, amount, rewarded)
            pending = pending._replace(reward=reward)
            if self.normalisation.return_limit:
                largest = jnp.where(rewarded, jnp.abs(amount), 0.0).max()
                pending = pending._replace(largest=jnp.maximum(pending.largest, largest))
        if self._counts_returns:
            trajectory = trajectory._replace(agent_state=trajectory.agent_state.agent)
        trajectory = trajectory._replace(
            timestep=self._seen(params.statistics, trajectory.timestep)
        )
        return learner_state._replace(pending=pending), batch._replace(trajectory=trajectory)

    def _returns(self, state: NormalisedState, timestep: TimeStep) -> Array:
        return state.discounted_return * self._discount + timestep.reward

    def _seen(self, statistics: Statistics, timestep: TimeStep) -> TimeStep:
        """Returns normalised steps."""
        cfg = self.normalisation
        observation = timestep.observation
        if cfg.observations:
            observation = self._standardiser.apply(
                statistics.observation, observation, cfg.observation_clip
            )
        reward = timestep.reward
        if cfg.rewards == "centred":
            reward = jnp.where(timestep.first(), 0.0, reward - statistics.reward.mean[0])
        reward = reward * cfg.reward_scale
        if cfg.rewards != "none":
            reward = reward * self._inverse_deviation(statistics)
        if cfg.reward_clip:
            reward = jnp.clip(reward, -cfg.reward_clip, cfg.reward_clip)
        return timestep._replace(observation=observation, reward=reward)

    def _scale(self, statistics: Statistics) -> Array | float:
        """Returns the factor on rewards, without clipping."""
        scale = self.normalisation.reward_scale
        if self.normalisation.rewards == "none":
            return scale
        return scale * self._inverse_deviation(statistics)

    def _inverse_deviation(self, statistics: Statistics) -> Array:
        # Only `centred` shifts rewards: a shift changes which policy is best if episodes may end
        # early.
        variance = statistics.reward.variance[0]
        factor = jnp.where(variance < 1e-8, 1.0, jax.lax.rsqrt(variance + 1e-8))
        if limit := self.normalisation.return_limit:
            factor = jnp.minimum(factor, limit / jnp.maximum(statistics.largest, 1e-8))
        return factor


class NormalisedEpochs(Normalised, WrappedEpochs):
    """An epoch agent with observations and rewards that are normalised once per batch."""

    def prepare(
        self, params: NormalisedParams, learner_state: NormalisedLearnerState, batch: Batch
    ) -> tuple[NormalisedLearnerState, PyTree, Array]:
        """Calls the agent's ``prepare`` with the normalised batch."""
        learner_state, batch = self._take(params, learner_state, batch)
        agent_state, rows, schedule = self.agent.prepare(params.agent, learner_state.agent, batch)
        return learner_state._replace(agent=agent_state), rows, schedule

    def update(
        self, params: NormalisedParams, learner_state: NormalisedLearnerState, minibatch: PyTree
    ) -> tuple[NormalisedParams, NormalisedLearnerState, LearnerOutput]:
        """Makes a gradient step of the agent; the statistics do not change."""
        agent_params, agent_state, output = self.agent.update(
            params.agent, learner_state.agent, minibatch
        )
        return (
            params._replace(agent=agent_params),
            learner_state._replace(agent=agent_state),
            output,
        )

    def finish(
        self, params: NormalisedParams, learner_state: NormalisedLearnerState
    ) -> tuple[NormalisedParams, NormalisedLearnerState]:
        """Moves the statistics of this batch into the params, for later acting and learning."""
        agent_params, agent_state = self.agent.finish(params.agent, learner_state.agent)
        return (
            NormalisedParams(agent_params, learner_state.pending),
            learner_state._replace(agent=agent_state),
        )

    learner_step = EpochAgent.learner_step


def normalised(agent: Agent, cfg: NormalisationConfig) -> Agent:
    """Returns the wrapped agent, or the agent itself if the config normalises nothing."""
    # A discount alone normalises nothing; configs of earlier versions have one.
    if dataclasses.replace(cfg, return_discount=None) == NormalisationConfig():
        return agent
    return NormalisedEpochs(agent, cfg) if isinstance(agent, EpochAgent) else Normalised(agent, cfg)


def _by_entry(obs_spec: PyTree) -> Standardiser:
    """Standardises every float entry by itself, except the action mask."""

    def apply(statistics: RunningStatistics, observation: PyTree, clip: float) -> PyTree:
        shown = normalise(statistics, observation, clip)
        if action_mask(observation) is not None:
            shown = {**shown, ACTION_MASK: observation[ACTION_MASK]}
        return shown

    return Standardiser(lambda: initial_statistics(obs_spec), update_statistics, apply)


_SCALAR = specs.Array((), "float32")
