"""A compiled loop and what it begins with, made from an experiment.

The engine that calls the loop is `rlstack.programs.run.fused`; the loops of sets of policies are
made by `rlstack.programs.build.policies.fused`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.acting.actor import transition_spec
from rlstack.agent import Agent
from rlstack.devices import mesh_of
from rlstack.fused.learning import Learning
from rlstack.fused.loop import CompiledLoop, FusedLoop, LoopState
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.networks import in_parts
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.seeds import acting_key, role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.types import EnvSpec, PRNGKey, PyTree, Transition


class Keys(NamedTuple):
    """The random keys that a run begins with; for several policies, dicts by their names."""

    learner: Any
    env: PRNGKey  # [B, ...]
    acting: Any
    replay: Any


class Parts:
    """A compiled loop of one policy, and its components.

    Attributes:
      loop: the loop.
      agents: the agents that learn, by the name of their policy.
      step_specs: shapes and dtypes of one step of each, as its replay stores it.
    """

    loop: CompiledLoop

    def __init__(self, experiment: Experiment, env: BatchedEnv, name: str = "") -> None:
        """Makes the agent and the loop.

        Args:
          experiment: the policy's experiment.
          env: the environments.
          name: the policy's name; "" for an experiment without names of policies.

        Raises:
          ValueError: the agent does not fit the environment.
        """
        agent, step_spec = make_learning_agent(experiment, env.spec)
        self.agents, self.step_specs = {name: agent}, {name: step_spec}
        self._name = name
        self.loop = FusedLoop(
            experiment.replay,
            agent,
            env,
            experiment.env.num_envs,
            steps_per_update=experiment.steps_per_update,
            check_updates=experiment.learner.check_finite,
            check_steps=experiment.env.check_finite,
            mesh=mesh_of(experiment.learner.devices, "Experiment: learner.devices"),
        )

    def by_name(self, tree: PyTree) -> dict[str, Any]:
        """Returns a part of the loop's state or reports as a dict by policy, which it may be."""
        return {self._name: tree}

    def joined(self, by_name: Mapping[str, Any]) -> Any:
        """Returns the argument of `by_name`."""
        return by_name[self._name]

    def unchanging(self, acting: Any) -> Any:
        """Returns the acting state for checkpoints, without what `with_the_rest` adds."""
        return acting

    def with_the_rest(self, saved: Any, fresh: Any) -> Any:
        """Returns a state that `unchanging` returned, with what it left out."""
        del fresh
        return saved

    def keys(self, experiment: Experiment, env_keys: PRNGKey) -> Keys:
        """Returns the keys of a run with the seed of this experiment."""
        seed = experiment.seed
        return Keys(
            role_key(seed, "learner"), env_keys, acting_key(seed, 0), role_key(seed, "replay")
        )

    def begin(self, keys: Keys) -> LoopState:
        """Returns the state at the start of a run, with newly initialised params; pure."""
        (agent,) = self.agents.values()
        return self.loop.start(untrained(agent, keys.learner), keys.env, keys.acting, keys.replay)


def make_learning_agent(experiment: Experiment, spec: EnvSpec) -> tuple[Agent, Transition]:
    """Returns an agent for a compiled loop, and the spec of one step as a replay stores it.

    Raises:
      ValueError: the agent does not fit the environment.
    """
    agent = make_agent(experiment, spec)
    step_spec = transition_spec(agent, spec)
    if experiment.learner.micro_batches > 1:
        parts = experiment.learner.micro_batches
        agent = agent.with_network(lambda network: in_parts(network, parts))
    return agent, step_spec


def untrained(agent: Agent, rng_key: PRNGKey) -> Learning:
    """Returns newly initialised params and learner state; pure."""
    params_key, learner_key = jax.random.split(rng_key)
    params = agent.initial_params(params_key)
    learner_state = agent.initial_learner_state(learner_key, params)
    return Learning(params, learner_state, jnp.zeros((), jnp.int32))
