"""Computes the action, probabilities and value of a finished run's agent, step by step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from programs.components.agent import make_agent
from programs.components.restored import Which, chosen_checkpoint, read_config, read_params
from programs.components.seeds import role_key
from programs.experiment import Experiment
from programs.tracking.run_dir import RunDir
from rlstack.distributions import Categorical, Joint, MultiCategorical
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    EnvSpec,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
)


class Prediction(NamedTuple):
    """The agent's output for one step of one environment."""

    action: PyTree  # the best action, in the structure of the action spec
    probabilities: Mapping[str, np.ndarray]  # by action type, float32 [capacity, n]; may be empty
    value: float | None  # the expected return of the rest of the episode; None without a critic


class Predictor:
    """The agent of a run with its newest params, acting greedily in one environment.

    Call `load` once, then the predictor with each step of the environment, in order.
    """

    def __init__(self, run_dir: str | os.PathLike[str], which: Which = "last"):
        """Reads the config of the run, whose last or best params are used.

        Raises:
          ValueError: the directory holds no run, or the run has no checkpoint.
        """
        self.experiment: Experiment = read_config(directory := RunDir.open(run_dir))
        self._checkpoint = chosen_checkpoint(directory, self.experiment, which)

    def load(self, spec: EnvSpec) -> None:
        """Reads the params.

        Args:
          spec: the spec of the environment.

        Raises:
          ValueError: the run was trained on environments of another spec.
        """
        self._params = read_params(self._checkpoint, self.experiment, spec)
        agent = make_agent(self.experiment, spec, greedy=True)
        self._key = role_key(self.experiment.seed, "evaluator")
        self._state = agent.initial_state(1)

        def act(
            key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
        ) -> tuple[AgentOut, AgentState, dict[str, Array]]:
            state = agent.reset_state(state, timestep.first())
            distribution = agent.action_distribution(key, params, timestep, state)
            output, state = agent.actor_step(key, params, timestep, state)
            return output, state, _probabilities(distribution)

        self._act = jax.jit(act)

    def __call__(self, timestep: TimeStep) -> Prediction:
        """Returns the prediction for the next step of the environment, ``[1, ...]``."""
        self._key, key = jax.random.split(self._key)
        output, self._state, probabilities = self._act(key, self._params, timestep, self._state)
        value = getattr(output, "value", None)
        return Prediction(
            jax.tree.map(np.asarray, output.action),
            {name: np.asarray(rows)[0] for name, rows in probabilities.items()},
            None if value is None else float(value[0]),
        )


def _probabilities(distribution: ActionDistribution | None) -> dict[str, Array]:
    """Returns the probabilities of the discrete action types, float32 [1, capacity, n]."""
    found: dict[str, Array] = {}
    components = distribution.components if isinstance(distribution, Joint) else None
    for name, component in components.items() if isinstance(components, dict) else ():
        if isinstance(component, Categorical | MultiCategorical):
            rows = component.logits.reshape((1, -1, component.logits.shape[-1]))
            found[name] = jax.nn.softmax(rows, axis=-1)
    return found
