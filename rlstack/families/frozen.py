"""A wrapper for params that do not learn, such as the earlier versions of a policy."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from rlstack.exploration import RunCounts, with_run_counts
from rlstack.families.wrapped import Wrapped
from rlstack.types import AgentOut, AgentState, Array, Params, PRNGKey, TimeStep


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
