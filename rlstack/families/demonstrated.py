"""A wrapper that adds recorded steps to every batch that an agent learns from.

With a share of 0.5 it is the symmetric sampling of RLPD (Ball et al. 2023,
https://arxiv.org/abs/2302.02948): each batch has as many items of the recording as of the replay,
drawn uniformly with replacement. The agent's update draws them itself, on its device and with the
learner's key. So every replay, topology and compiled loop has them, and a resumed run draws on
where it was. The recording is part of the compiled update and takes its own size of memory there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.agent import Agent
from rlstack.families.wrapped import Wrapped
from rlstack.types import (
    Array,
    Batch,
    LearnerOutput,
    LearnerState,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Transition,
)


class Recording(NamedTuple):
    """Recorded steps, N in all, and where the items begin that may be drawn."""

    timestep: TimeStep  # [N, ...]
    action: PyTree  # [N, ...]
    starts: Array  # [items] int32


def is_demonstrated(batch: Batch) -> Array:
    """Returns which items are of the recording, ``[B]`` bool; none without one."""
    found = batch.demonstrated
    return jnp.zeros(batch.weights.shape, bool) if found is None else jnp.asarray(found)


class DemonstratedState(NamedTuple):
    """The learner's state."""

    agent: LearnerState
    rng_key: PRNGKey


class Demonstrated(Wrapped):
    """An agent that learns from its replay and from a recording."""

    def __init__(self, agent: Agent, load: Callable[[], Recording], share: float) -> None:
        """Wraps an agent.

        Args:
          agent: an agent whose output of acting is the action alone, and that learns in one step
            from each batch.
          load: returns the recording; it is called when an update is traced.
          share: share of recorded items in a batch, in (0, 1).
        """
        super().__init__(agent, load, share)
        self._load, self._share = load, share

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> DemonstratedState:
        """Returns the agent's initial learner state, and a key for the draws."""
        agent_key, draw_key = jax.random.split(rng_key)
        return DemonstratedState(self.agent.initial_learner_state(agent_key, params), draw_key)

    def learner_step(
        self, params: Params, learner_state: DemonstratedState, batch: Batch
    ) -> tuple[Params, DemonstratedState, LearnerOutput]:
        """Lets the agent learn from the batch and recorded items; priorities are the batch's."""
        draw_key, rng_key = jax.random.split(learner_state.rng_key)
        joined = self.joined(draw_key, batch)
        params, agent_state, output = self.agent.learner_step(params, learner_state.agent, joined)
        if output.priorities is not None:
            output = output._replace(priorities=output.priorities[: len(batch.weights)])
        own = jax.tree.map(lambda x: x[:, : len(batch.weights)], output.updates)
        output = output._replace(updates=own)
        return params, DemonstratedState(agent_state, rng_key), output

    def joined(self, rng_key: PRNGKey, batch: Batch) -> Batch:
        """Returns the batch, followed by recorded items, whose weight is 1."""
        size = len(batch.weights)
        count = max(1, round(size * self._share / (1 - self._share)))
        recording, trajectory = self._load(), batch.trajectory
        length = trajectory.timestep.reward.shape[0]
        chosen = jax.random.randint(rng_key, (count,), 0, len(recording.starts))
        steps = jnp.asarray(recording.starts)[chosen] + jnp.arange(length)[:, None]

        def read(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.asarray(x)[steps], tree)

        def everywhere(x: Array, acted: Array) -> Array:
            return jnp.broadcast_to(x, (len(acted), *jnp.shape(x)))

        output: Any = type(trajectory.agent_output)
        drawn = Transition(
            timestep=read(recording.timestep),
            agent_output=output(read(recording.action)),
            agent_state=jax.tree.map(
                everywhere, self.agent.initial_state(count), trajectory.agent_state
            ),
            params_version=jnp.zeros((length, count), jnp.int32),
        )
        return Batch(
            jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), trajectory, drawn),
            jnp.concatenate([batch.weights, jnp.ones(count, jnp.float32)]),
            jnp.arange(size + count) >= size,
        )
