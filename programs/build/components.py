"""From the experiment config to the parts that every topology wires together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TextIO

import jax

from agents import AGENTS
from programs.build.seeds import role_key, role_seed
from programs.experiment import Experiment
from rlstack import exploration
from rlstack.acting.evaluator import Evaluator
from rlstack.agent import Agent
from rlstack.families.normalised import normalised
from rlstack.references import load_object, nearest
from rlstack.replay import InProcessReplay, ReplayBuffer, ReplayConfig, bytes_needed
from rlstack.replay.frame_stack import FrameStacks, StackedReplay
from rlstack.replay.memory import check_memory
from rlstack.replay.shared_memory.block import FOLDER
from rlstack.replay.shared_memory.steps import total_bytes
from rlstack.types import EnvSpec, Transition


def make_agent(experiment: Experiment, spec: EnvSpec, *, greedy: bool = False) -> Agent:
    """Makes the agent, to explore with or, when greedy, to be judged."""
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
    policy = (
        exploration.Greedy
        if greedy
        else functools.partial(entry.policy, cfg, experiment.total_envs)
    )
    agent = entry.agent(cfg, spec.observation, spec.action, network, policy)
    return normalised(agent, experiment.normalisation)


def make_replay(experiment: Experiment, spec: Transition) -> ReplayBuffer:
    """Makes the replay of a single process, for steps of this `transition_spec`."""
    num_envs, seed = experiment.env.num_envs, role_seed(experiment.seed, "replay")

    def make(cfg: ReplayConfig, spec: Transition) -> InProcessReplay:
        return InProcessReplay(cfg, num_envs, seed=seed, spec=spec)

    return make_stacked(experiment, spec, make)


def announce_replay(experiment: Experiment, spec: Transition, stream: TextIO) -> None:
    """Says how much memory the replay takes, before anything takes it.

    Args:
      experiment: whose replay.
      spec: of one environment's step, as `rlstack.acting.actor.transition_spec` gives it.
      stream: where to.

    Raises:
      ValueError: there is not that much.
    """
    (cfg, stored), num_envs = as_stored(experiment, spec), experiment.total_envs
    if experiment.topology in ("heavy_env", "light_env"):
        shared, beside = total_bytes(cfg, num_envs, stored)
        check_memory(shared, "replay", FOLDER)
        size = shared + beside
    else:
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), stored)
        size = bytes_needed(cfg, example, num_envs)
    check_memory(size, "replay")
    print(f"replay: {size:,} bytes at most", file=stream, flush=True)


def as_stored(experiment: Experiment, spec: Transition) -> tuple[ReplayConfig, Transition]:
    """Returns the config and the spec of what is stored, which differ where frames are stacked."""
    cfg = experiment.replay
    if not cfg.frame_stack:
        return cfg, spec
    stacks = FrameStacks(cfg, experiment.total_envs, spec)
    return stacks.cfg, stacks.spec


def make_stacked(
    experiment: Experiment, spec: Transition, make: Callable[[ReplayConfig, Transition], Any]
) -> Any:
    """Makes what stores steps, so that it stores stacked frames once if the config says so."""
    cfg = experiment.replay
    if cfg.frame_stack:
        return StackedReplay(cfg, experiment.total_envs, spec, make)
    return make(cfg, spec)


def make_evaluator(experiment: Experiment, spec: EnvSpec) -> Evaluator:
    """Makes the evaluator, with the agent's greedy policy."""
    agent = make_agent(experiment, spec, greedy=True)
    return Evaluator(experiment.evaluator, agent, role_key(experiment.seed, "evaluator"))
