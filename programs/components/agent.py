"""Makes the agent of an experiment, and its evaluator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from agents import AGENTS
from programs.components.seeds import role_key
from programs.experiment import Experiment
from rlstack import exploration
from rlstack.acting.evaluator import Evaluator
from rlstack.agent import Agent
from rlstack.checks import WrongKindError
from rlstack.families.normalised import normalised
from rlstack.references import call_factory, nearest
from rlstack.types import EnvSpec


def make_agent(experiment: Experiment, spec: EnvSpec, *, greedy: bool = False) -> Agent:
    """Makes the agent, with its exploring policy or, for evaluation, the greedy one.

    Raises:
      ValueError: the agent, its network or its policy does not fit the environment.
      WrongKindError: the network or policy factory of the config is not such a function.
    """
    cfg = experiment.agent
    if type(cfg) not in AGENTS:
        raise ValueError(
            f"Experiment: agent is a {type(cfg).__name__}, which no agent is registered for"
            f"{nearest(type(cfg).__name__, {kind.__name__: kind for kind in AGENTS})}. "
            "Decorate its class with agents.register."
        )
    entry = AGENTS[type(cfg)]
    network = (
        _Factory("network_factory", experiment.network_factory)
        if experiment.network_factory
        else functools.partial(entry.network, cfg=experiment.network)
    )
    policy: Callable[[], exploration.Policy]
    if greedy:
        policy = exploration.Greedy
    elif experiment.policy_factory:
        policy = _Factory("policy_factory", experiment.policy_factory)
    else:
        policy = functools.partial(entry.policy, cfg, experiment.total_envs)
    agent = entry.agent(cfg, spec.observation, spec.action, network, policy)
    return normalised(agent, experiment.normalisation)


@dataclasses.dataclass(frozen=True)
class _Factory:
    """A user's factory, with checks of what it is and what it returns; it can be pickled."""

    field: str  # of the experiment
    reference: str  # "module:callable"

    def __call__(self, *arguments: object) -> Any:
        wanted = _FACTORIES[self.field]
        rule = f"Experiment: {self.field} {self.reference} must be a function {wanted}"
        made = call_factory(f"Experiment: {self.field}", self.reference, wanted, *arguments)
        # Networks are NamedTuples of functions, policies are functions.
        fits = hasattr(made, "_fields") if arguments else callable(made)
        if not fits:
            raise WrongKindError(f"{rule}; it returned {type(made).__name__} {made!r:.80}.")
        return made


_FACTORIES = {
    "network_factory": "(obs_spec, action_spec) -> Network or PolicyAndCritic of rlstack.networks",
    "policy_factory": "() -> Policy of rlstack.exploration",
}


def make_evaluator(experiment: Experiment, spec: EnvSpec) -> Evaluator:
    """Makes the evaluator, with the agent's greedy policy."""
    agent = make_agent(experiment, spec, greedy=True)
    return Evaluator(experiment.evaluator, agent, role_key(experiment.seed, "evaluator"))
