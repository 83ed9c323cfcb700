"""The agent of a finished run, asked step by step for its action, probabilities and value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from programs.build.components import make_agent
from programs.build.restored import newest_checkpoint, read_config, read_params
from programs.build.seeds import role_key
from programs.experiment import Experiment
from programs.tracking.run_dir import RunDir
from rlstack.agent import Agent
from rlstack.distributions import Categorical, Joint, MultiCategorical
from rlstack.exploration import Counts, Greedy
from rlstack.families.normalised import Normalised
from rlstack.types import AgentState, EnvSpec, PRNGKey, PyTree, TimeStep


class Prediction(NamedTuple):
    """The agent's output for one step of one environment."""

    action: PyTree  # the best action, in the structure of the action spec
    probabilities: Mapping[str, np.ndarray]  # by action type, float32 [capacity, n]; may be empty
    value: float | None  # the expected return of the rest of the episode; None without a critic


class Predictor:
    """The agent of a run with its newest params, acting greedily in one environment.

    Call `load` once, then the predictor with each step of the environment in turn.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        """Reads the config of the run.

        Raises:
          ValueError: the directory holds no run, or the run has no checkpoint.
        """
        self.experiment: Experiment = read_config(directory := RunDir.open(run_dir))
        self._checkpoint = newest_checkpoint(directory, self.experiment)

    def load(self, spec: EnvSpec) -> None:
        """Reads the params.

        Args:
          spec: the spec of the environment.

        Raises:
          ValueError: the run was trained on environments of another spec.
        """
        self._params = read_params(self._checkpoint, self.experiment, spec)
        policy = _Watched()
        agent = _with_policy(make_agent(self.experiment, spec, greedy=True), policy)
        self._key = role_key(self.experiment.seed, "evaluator")
        self._state = agent.initial_state(1)

        def act(key: PRNGKey, params: Any, timestep: TimeStep, state: AgentState) -> Any:
            policy.distribution = None
            state = agent.reset_state(state, timestep.first())
            output, state = agent.actor_step(key, params, timestep, state)
            return output, state, _probabilities(policy.distribution)

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


class _Watched(Greedy):
    """Keeps the distribution that it last took the mode of, for who traces the agent."""

    distribution: Any = None

    def __call__(self, rng_key: PRNGKey, distribution: Any, counts: Counts) -> PyTree:
        self.distribution = distribution
        return super().__call__(rng_key, distribution, counts)


def _with_policy(agent: Agent, policy: Greedy) -> Agent:
    """Returns the same agent with another policy; what wraps it stays around it."""
    if isinstance(agent, Normalised):
        return type(agent)(_with_policy(agent.agent, policy), agent.normalisation)
    kind, arguments = agent.__reduce__()
    return kind(*arguments[:-1], lambda: policy)


def _probabilities(distribution: Any) -> dict[str, Any]:
    """Those of a structured discrete policy, float32 [1, capacity, n] by action type."""
    found = {}
    components = distribution.components if isinstance(distribution, Joint) else None
    for name, component in components.items() if isinstance(components, dict) else ():
        if isinstance(component, Categorical | MultiCategorical):
            rows = component.logits.reshape((1, -1, component.logits.shape[-1]))
            found[name] = jax.nn.softmax(rows, axis=-1)
    return found
