"""Makes the agent of an experiment, and its evaluator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from agents import AGENTS
from programs.components.seeds import role_key
from programs.experiment import Experiment
from rlstack import exploration
from rlstack.acting.evaluator import Evaluator
from rlstack.agent import Agent
from rlstack.families.normalised import normalised
from rlstack.references import load_object, nearest
from rlstack.types import EnvSpec

if TYPE_CHECKING:
    pass


def make_agent(experiment: Experiment, spec: EnvSpec, *, greedy: bool = False) -> Agent:
    """Makes the agent, with its exploring policy or, for evaluation, the greedy one."""
    cfg = experiment.agent
    if type(cfg) not in AGENTS:
        raise ValueError(
            f"Experiment: agent is a {type(cfg).__name__}, which no agent is registered for"
            f"{nearest(type(cfg).__name__, {kind.__name__: kind for kind in AGENTS})}. "
            "Decorate its class with agents.register."
        )
    entry = AGENTS[type(cfg)]
    network = (
        load_object(experiment.network_factory)
        if experiment.network_factory
        else functools.partial(entry.network, cfg=experiment.network)
    )
    policy: Callable[[], exploration.Policy]
    if greedy:
        policy = exploration.Greedy
    elif experiment.policy_factory:
        policy = load_object(experiment.policy_factory)
    else:
        policy = functools.partial(entry.policy, cfg, experiment.total_envs)
    agent = entry.agent(cfg, spec.observation, spec.action, network, policy)
    return normalised(agent, experiment.normalisation)


def make_evaluator(experiment: Experiment, spec: EnvSpec) -> Evaluator:
    """Makes the evaluator, with the agent's greedy policy."""
    agent = make_agent(experiment, spec, greedy=True)
    return Evaluator(experiment.evaluator, agent, role_key(experiment.seed, "evaluator"))
