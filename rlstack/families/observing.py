"""A wrapper that shows an agent a function of the observation, such as some of its features.

The function is part of the agent. So acting, learning and evaluation see the same, in every
topology and from recorded data; environments, replay and messages keep the whole observation. The
wrapped agent needs no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.agent import Agent, EpochAgent
from rlstack.families.wrapped import Wrapped, WrappedEpochs
from rlstack.references import Hook, check_callable, load_hook, name_of
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    Batch,
    EnvSpec,
    LearnerOutput,
    LearnerState,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Trajectory,
)

_FIELD = "Experiment: observation_processor"
_WANTED = "(observation) -> observation, with jax.numpy and for one step without a batch axis"


def load_processor(hook: Hook) -> Callable[[PyTree], PyTree]:
    """Returns the user's function, and checks its signature.

    Raises:
      ValueError: the function cannot be imported.
      WrongKindError: the hook is not a function of one argument.
    """
    function = load_hook(_FIELD, hook)
    check_callable(f"{_FIELD} {name_of(hook)} must be a function {_WANTED}", function, None)
    return function


class View:
    """The user's observation function, applied to the observations of a spec.

    Attributes:
      obs_spec: the spec of the environment's observations.
      seen_spec: the spec of the function's result. Entries that the function returns unchanged keep
        their specs; others have no bounds.
    """

    def __init__(self, hook: Hook, obs_spec: PyTree) -> None:
        """Calls the function once, for shapes only.

        Args:
          hook: the function, see `load_processor`.
          obs_spec: the spec of one observation of the environment.

        Raises:
          ValueError: the function cannot be imported, does not fit these observations, or returns
            no arrays.
        """
        self._hook, self.obs_spec = hook, obs_spec
        self._function = load_processor(hook)
        self.seen_spec = self._spec()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._hook, self.obs_spec)

    def __call__(self, timestep: TimeStep) -> TimeStep:
        """Returns steps with any number of leading axes as the agent sees them."""
        function = self._function
        for _ in range(np.ndim(timestep.step_type)):
            function = jax.vmap(function)
        return timestep._replace(observation=function(timestep.observation))

    def _spec(self) -> PyTree:
        found: list[PyTree] = []

        def trace(observation: PyTree) -> PyTree:
            leaves, known = jax.tree.leaves(observation), jax.tree.leaves(self.obs_spec)
            kept = {id(leaf): spec for leaf, spec in zip(leaves, known, strict=True)}

            def spec(leaf: Any) -> specs.Array:
                array = jnp.asarray(leaf)
                return kept.get(id(leaf)) or specs.Array(array.shape, np.dtype(array.dtype))

            made = self._function(observation)
            found.append(jax.tree.map(spec, made))
            return jax.tree.map(jnp.asarray, made)

        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.obs_spec)
        shown = jax.tree.map(lambda s: f"{s.dtype}{list(s.shape)}", self.obs_spec)
        rule = f"{_FIELD} {name_of(self._hook)} must be a function {_WANTED}; for {shown}"
        try:
            jax.eval_shape(trace, shapes)
        except Exception as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ValueError(f"{rule} it raised {type(error).__name__}: {reason}") from error
        if not jax.tree.leaves(found[0]):
            raise ValueError(f"{rule} it returned no arrays.")
        return found[0]


class ExtraView:
    """Steps with one entry of their extras in the observation, for a critic.

    Attributes:
      obs_spec: the spec of the observations without the entry.
      seen_spec: the spec of observations with the entry: a dict, in which an observation that is
        none has the name ``observation``.
    """

    def __init__(self, entry: str, spec: EnvSpec) -> None:
        """Stores the name of the entry; `spec` has it among its extras."""
        self._entry, self.obs_spec = entry, spec.observation
        self.seen_spec = self._joined(spec.observation, spec.extras)

    def __call__(self, timestep: TimeStep) -> TimeStep:
        """Returns steps with any number of leading axes as the agent sees them."""
        return timestep._replace(observation=self._joined(timestep.observation, timestep.extras))

    def _joined(self, observation: PyTree, extras: PyTree) -> PyTree:
        if not isinstance(observation, Mapping):
            observation = {"observation": observation}
        return {**observation, self._entry: extras[self._entry]}


class Observing(Wrapped):
    """An agent that sees a function of the steps."""

    def __init__(self, agent: Agent, view: View | ExtraView) -> None:
        """Wraps an agent. Call `observing` instead, which chooses the class."""
        super().__init__(agent, view)
        self.view, self.obs_spec = view, view.obs_spec

    def lay_out(self, timestep: TimeStep) -> TimeStep:
        """Returns the steps unchanged: only the agent's own observations can be laid out."""
        return timestep

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> ActionDistribution | None:
        """Returns the agent's distribution for what it sees."""
        return self.agent.action_distribution(rng_key, params, self.view(timestep), state)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Acts on the view of the steps ``[B, ...]``."""
        return self.agent.actor_step(rng_key, params, self.view(timestep), state)

    def trajectory_values(self, params: Params, trajectory: Trajectory) -> Array:
        """Returns the agent's values of the view of the steps."""
        return self.agent.trajectory_values(params, self._viewed(trajectory))

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Updates the agent from the view of the batch."""
        return self.agent.learner_step(params, learner_state, self._seen(batch))

    def _seen(self, batch: Batch) -> Batch:
        return batch._replace(trajectory=self._viewed(batch.trajectory))

    def _viewed(self, trajectory: Trajectory) -> Trajectory:
        return trajectory._replace(timestep=self.view(trajectory.timestep))


class ObservingEpochs(Observing, WrappedEpochs):
    """An epoch agent that sees a function of the observations, computed once per batch."""

    def prepare(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, PyTree, Array]:
        """Calls the agent's ``prepare`` with the view of the batch."""
        return self.agent.prepare(params, learner_state, self._seen(batch))


def observing(agent: Agent, view: View | ExtraView) -> Agent:
    """Returns the wrapped agent, whose observations are those of the environment.

    Args:
      agent: an agent built for observations of ``view.seen_spec``.
      view: converts the environment's observations to those that the agent sees.
    """
    return ObservingEpochs(agent, view) if isinstance(agent, EpochAgent) else Observing(agent, view)
