"""The records that travel between environments, agents, replay and learners.

Axes, here and everywhere: T time, B batch, A actions. Acting data is ``[B, ...]``; learner data is
time-major, ``[T+1, B, ...]``. Every record is a ``NamedTuple`` and therefore a JAX pytree;
observations, actions and agent states are pytrees of arrays. Arrays are numpy arrays in drivers and
JAX arrays inside jitted functions.

Time steps have the meaning of dm_env everywhere. ``reward`` and ``discount`` belong to the
*previous* action. The first step of an episode has reward 0 and discount 1; a termination is LAST
with discount 0; a truncation (time limit) is LAST with discount 1, and its observation is the true
last one. Environments reset themselves on the step *after* LAST: the action sent at LAST is ignored
and a FIRST step is returned, so LAST -> FIRST is not a transition. A seat that is not in its game
is FIRST in each step; FIRST -> FIRST is not a transition either.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from numpy.typing import DTypeLike

Array = jax.Array | np.ndarray
PyTree = Any  # a nested structure of arrays
ActionDistribution = Any  # an `rlstack.distributions.Distribution`
AgentState = Any  # an agent's acting state of each environment, [B, ...]; `()` if it has none
AgentOut = Any  # an agent's own NamedTuple; its first field is `action`
LearnerState = Any  # optimizer state, target params, counters and the learner's rng_key
Params = Any
PRNGKey = Array
Logs = dict[str, Array]  # scalars by name, or vectors to average


class StepType(enum.IntEnum):
    """The position of a step in its episode (dm_env's values)."""

    FIRST = 0
    MID = 1
    LAST = 2


class TimeStep(NamedTuple):
    """One step of a batch of environments; leading axes are ``[B]`` or ``[T+1, B]``."""

    step_type: Array  # [B] int32, a StepType
    reward: Array  # [B] float32, for the previous action; 0 at FIRST
    discount: Array  # [B] float32, 0 at termination, else 1
    observation: PyTree  # [B, ...]
    # [B, ...] further signals for learning, of `EnvSpec.extras`: costs, a level's number, what only
    # a critic sees. Without any it is (), which has no leaves.
    extras: PyTree = ()

    def first(self) -> Array:
        """Returns where an episode begins, ``[B]`` bool."""
        return self.step_type == StepType.FIRST

    def last(self) -> Array:
        """Returns where an episode ends, ``[B]`` bool."""
        return self.step_type == StepType.LAST


class Counts(NamedTuple):
    """The progress of each environment of a batch, on which exploration may depend."""

    env_steps: Array  # [B] int32, number of transitions
    episodes: Array  # [B] int32, number of finished episodes
    env_ids: Array | None = None  # [B] int32, environment ids; EpsilonLadder needs them


class Transition(NamedTuple):
    """One acting step, as replay stores it."""

    timestep: TimeStep  # [B, ...] the input of the agent
    agent_output: AgentOut  # [B, ...] the output of the agent
    agent_state: AgentState  # [B, ...] the state at the *beginning* of the step
    params_version: Array  # [B] int32, the version of the params that acted


# The same record with a leading [T+1] axis: T transitions and the step to bootstrap from.
Trajectory = Transition


class Batch(NamedTuple):
    """The data that ``Agent.learner_step`` learns from."""

    trajectory: Trajectory  # [T+1, B, ...]
    weights: Array  # [B] float32, importance weights; ones where sampling is uniform
    demonstrated: Array | None = None  # [B] bool, items of replay.demonstrations; None without


class LearnerOutput(NamedTuple):
    """The third result of ``Agent.learner_step``, after params and learner state."""

    logs: Logs  # scalars
    priorities: Array | None = None  # [B] float32, new replay priorities of the batch's items
    # [T+1, B, ...] new values of the stored `Transition.agent_output` of the batch's items, with
    # None for the arrays that stay; needs `Agent.writes_back`
    updates: AgentOut | None = None


class LogWriter(Protocol):
    """Receives scalars during a run; see `rlstack.storage.loggers`."""

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Records `logs` (name -> scalar) at `step`: environment frames, or a learner's updates."""


class StartSpec(jax.ShapeDtypeStruct):
    """The spec of a leaf of a step that learners read at the first step of an item only.

    Replay may then store it at these steps only. A batch has it as ``[1, B, ...]`` or, from a
    replay that stores every step, as ``[T+1, B, ...]``.
    """

    __slots__ = ("step",)

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, step: int = 0):
        """Describes a leaf without batch axis.

        Args:
          shape: the leaf's shape in one environment's step.
          dtype: the leaf's dtype.
          step: the step of a stored item that is the learner's first; those before it only provide
            context and are not in the learner's items.
        """
        super().__init__(shape, dtype)
        self.step = step


class EnvSpec(NamedTuple):
    """What an environment exchanges, without batch axis: trees of ``dm_env.specs``."""

    observation: PyTree
    action: PyTree
    extras: PyTree = ()  # of `TimeStep.extras`


def merge_leading_dims(tree: PyTree) -> PyTree:
    """Joins the first two axes of each leaf: ``[T, B, ...]`` becomes ``[T * B, ...]``."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), tree)
