"""The base class of wrappers that give PPO, V-MPO and theirs a second stream of rewards.

The second stream (a bonus, a cost) has a value of its own in the learner's state, and the advantage
that the agent learns from is a weighted sum of both. Params are those of the wrapped agent, and so
are what acts, is evaluated and is exported.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent, EpochAgent
from rlstack.families.wrapped import WrappedEpochs
from rlstack.networks import Network
from rlstack.networks.ragged.entity_layout import is_entity_spec
from rlstack.types import Array, LearnerOutput, LearnerState, Logs, Params, PyTree, TimeStep


class StreamRows(NamedTuple):
    """The rows of an update, with the leading axes of the agent's."""

    agent: PyTree
    own: Any  # what the second stream learns from; () if it does not learn from rows


class TwoStreams(WrappedEpochs):
    """An agent in epochs whose rows have the advantage of two streams.

    The learner's state is a NamedTuple of the agent's state and of the second stream's.
    """

    @abc.abstractmethod
    def learn_stream(self, state: Any, rows: Any) -> tuple[Any, Logs]:
        """Makes a gradient step of the second stream; returns its new state, and logs."""

    def join(
        self, agent_rows: Any, own: PyTree, advantage: Array, weights: tuple[Any, Any]
    ) -> StreamRows:
        """Returns the rows of both, with the weighted sum of their advantages.

        Args:
          agent_rows: the agent's `rlstack.families.epochs.EpochRows`.
          own: the rows of the second stream, ``[T, B, ...]``.
          advantage: of the second stream, ``[T, B]``.
          weights: factors of the agent's advantage and of this one.
        """
        is_recurrent = agent_rows.mask.ndim == 2  # recurrent agents have rows [B, T, ...]

        def lay_out(x: Array) -> Array:
            return jnp.swapaxes(x, 0, 1) if is_recurrent else x.reshape((-1, *x.shape[2:]))

        own, advantage = jax.tree.map(lay_out, (own, advantage))
        advantage = weights[0] * agent_rows.advantage + weights[1] * jnp.where(
            agent_rows.mask, advantage, 0.0
        )
        return StreamRows(agent_rows._replace(advantage=advantage), own)

    def update(
        self, params: Params, learner_state: LearnerState, minibatch: StreamRows
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Makes a gradient step of the agent, and one of the second stream."""
        agent_state, own = learner_state
        params, agent_state, output = self.agent.update(params, agent_state, minibatch.agent)
        if len(minibatch.own):
            own, logs = self.learn_stream(own, minibatch.own)
            output = output._replace(logs={**output.logs, **logs})
        return params, type(learner_state)(agent_state, own), output

    def batch_logs(self, rows: StreamRows) -> Logs:
        """Returns the agent's logs."""
        return self.agent.batch_logs(rows.agent)

    def lay_out(self, timestep: TimeStep) -> TimeStep:
        """Returns the steps unchanged: only the agent's own observations can be laid out."""
        return timestep

    def lay_out_rows(self, minibatch: StreamRows) -> StreamRows:
        """Returns the rows unchanged, see `lay_out`."""
        return minibatch

    def finish(self, params: Params, learner_state: LearnerState) -> tuple[Params, LearnerState]:
        """Ends the batch of the agent."""
        params, agent_state = self.agent.finish(params, learner_state[0])
        return params, type(learner_state)(agent_state, learner_state[1])

    learner_step = EpochAgent.learner_step


def require_arrays(name: str, agent: Agent, purpose: str) -> None:
    """Raises a ValueError if observations are of entities, which the networks here cannot take."""
    if is_entity_spec(agent.obs_spec):
        raise ValueError(
            f"{name}: observations must be arrays of fixed shapes for {purpose}; got "
            f"those of entities. Use the agent without {purpose}, or a padded game."
        )


def network_outputs(
    network: Network, params: Params, observation: PyTree, leading: tuple[int, ...]
) -> Array:
    """Returns a feed-forward network's output for observations with any leading axes."""
    merged = jax.tree.map(lambda x: x.reshape((-1, *x.shape[len(leading) :])), observation)
    rows = jnp.zeros(int(np.prod(leading)))
    timestep = TimeStep(rows.astype(jnp.int32), rows, rows, merged)
    output: Any = network.apply(None, params, timestep, ())[0]
    return output.reshape((*leading, *output.shape[1:]))
