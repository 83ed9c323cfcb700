"""An agent around another agent: a base class for wrappers, which change some of its methods.

`Frozen` is one for params that do not learn, such as the earlier versions of a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from rlstack.agent import Agent, EpochAgent
from rlstack.exploration import RunCounts, with_run_counts
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


class Wrapped(Agent):
    """Calls the same methods of another agent, ``agent``.

    A wrapper is also an `EpochAgent` if the other agent is one: see `WrappedEpochs`.
    """

    def __init__(self, agent: Agent, *others: Any) -> None:
        """Takes over the agent's parts.

        Args:
          agent: the other agent.
          others: further arguments of the subclass. It is made again from them, when it is pickled
            and by `with_network`.
        """
        self.agent, self._others = agent, others
        self.cfg = agent.cfg
        self.obs_spec, self.action_spec = agent.obs_spec, agent.action_spec
        self.network, self.policy = agent.network, agent.policy
        self.learns, self.has_priorities = agent.learns, agent.has_priorities
        self.writes_back, self.has_values = agent.writes_back, agent.has_values
        self.reads_rewards = agent.reads_rewards

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.agent, *self._others)

    def with_network(self, change: Callable[[Any], Any]) -> Wrapped:
        """Changes the network of the agent."""
        return type(self)(self.agent.with_network(change), *self._others)

    def check_extras(self, extras: PyTree) -> None:
        """Calls the same method of the agent."""
        self.agent.check_extras(extras)

    def read_once(self, state: AgentState) -> PyTree:
        """Calls the same method of the agent, unless the wrapper has a state of its own."""
        if type(self).initial_state is not Wrapped.initial_state:
            return super().read_once(state)
        return self.agent.read_once(state)

    def trajectory_values(self, params: Params, trajectory: Trajectory) -> Array:
        """Calls the same method of the agent."""
        return self.agent.trajectory_values(params, trajectory)

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Calls the same method of the agent."""
        return self.agent.initial_params(rng_key)

    def initial_state(self, batch_size: int) -> AgentState:
        """Calls the same method of the agent."""
        return self.agent.initial_state(batch_size)

    def reset_state(self, state: AgentState, first: Array) -> AgentState:
        """Calls the same method of the agent."""
        return self.agent.reset_state(state, first)

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> LearnerState:
        """Calls the same method of the agent."""
        return self.agent.initial_learner_state(rng_key, params)

    def lay_out(self, timestep: TimeStep) -> TimeStep:
        """Calls the same method of the agent."""
        return self.agent.lay_out(timestep)

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> ActionDistribution | None:
        """Calls the same method of the agent."""
        return self.agent.action_distribution(rng_key, params, timestep, state)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Calls the same method of the agent."""
        return self.agent.actor_step(rng_key, params, timestep, state)

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Calls the same method of the agent."""
        return self.agent.learner_step(params, learner_state, batch)


class WrappedEpochs(Wrapped, EpochAgent):
    """Calls the same methods of another agent that learns in epochs."""

    agent: EpochAgent

    def __init__(self, agent: EpochAgent, *others: Any) -> None:
        super().__init__(agent, *others)
        self.may_stop = agent.may_stop

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Calls the same method of the agent, or its parts here if a subclass changes one."""
        parts = ("prepare", "update", "batch_logs", "stops_at", "finish")
        if any(getattr(type(self), part) is not getattr(WrappedEpochs, part) for part in parts):
            return EpochAgent.learner_step(self, params, learner_state, batch)
        return self.agent.learner_step(params, learner_state, batch)

    def prepare(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, PyTree, Array]:
        """Calls the same method of the agent."""
        return self.agent.prepare(params, learner_state, batch)

    def update(
        self, params: Params, learner_state: LearnerState, minibatch: PyTree
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Calls the same method of the agent."""
        return self.agent.update(params, learner_state, minibatch)

    def batch_logs(self, rows: PyTree) -> Logs:
        """Calls the same method of the agent."""
        return self.agent.batch_logs(rows)

    def stops_at(self, logs: Logs) -> Array:
        """Calls the same method of the agent."""
        return self.agent.stops_at(logs)

    def lay_out_rows(self, minibatch: PyTree) -> PyTree:
        """Calls the same method of the agent."""
        return self.agent.lay_out_rows(minibatch)

    def finish(self, params: Params, learner_state: LearnerState) -> tuple[Params, LearnerState]:
        """Calls the same method of the agent."""
        return self.agent.finish(params, learner_state)


class FrozenParams(NamedTuple):
    """Params with the progress of the run at the time when they were taken."""

    params: Params
    env_steps: Array  # [] int32, of each environment


class Frozen(Wrapped):
    """An agent that explores as the run did when its `FrozenParams` were taken.

    Its state may have acted with other params before. A schedule over episodes follows the state.
    """

    def initial_params(self, rng_key: PRNGKey) -> FrozenParams:
        """Returns the agent's initial params, at the start of a run."""
        return FrozenParams(self.agent.initial_params(rng_key), jnp.zeros((), jnp.int32))

    def actor_step(
        self, rng_key: PRNGKey, params: FrozenParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Calls the agent's ``actor_step`` on ``[B, ...]`` steps, with the counts of the params."""
        state = with_run_counts(state, RunCounts(params.env_steps, None))
        return self.agent.actor_step(rng_key, params.params, timestep, state)
