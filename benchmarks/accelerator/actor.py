"""Acting on JAX's default device, against a bare jitted call, and in two threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.settings import experiment_of, spec_of
from benchmarks.learners import random_timestep
from benchmarks.report import alternate, at_once, rate
from rlstack.acting.actor import transition_spec
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.agent import Agent
from rlstack.configs.acting import InferencerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.types import Params, TimeStep

Act = Callable[[], Any]  # acts once and waits for the actions


def actor(name: str, quick: bool) -> dict[str, Any]:
    """Calls per second for the environments of one actor, and how long their observations move."""
    experiment = experiment_of(name)
    spec = spec_of(experiment)
    agent, num_envs = make_agent(experiment, spec), experiment.env.num_envs
    params = jax.jit(agent.initial_params)(jax.random.PRNGKey(0))
    timestep = random_timestep(transition_spec(agent, spec), num_envs)
    ours = [_ours(agent, params, timestep, num_envs) for _ in range(2)]
    bare = _bare(agent, params, timestep, num_envs)
    for act in (*ours, bare):
        act()
    calls = max(2, int((0.1 if quick else 1.0) * rate(10, lambda: _repeat(10, bare))))
    comparison = alternate(
        lambda: rate(calls, lambda: _repeat(calls, ours[0])),
        lambda: rate(calls, lambda: _repeat(calls, bare)),
        2 if quick else 5,
    )
    moved = rate(calls, lambda: _repeat(calls, lambda: _move(timestep)))
    works = [functools.partial(_repeat, calls, act) for act in ours]
    together = rate(calls * len(works), lambda: at_once(works))
    return {
        "calls_per_second": round(comparison.medians["ours"], 1),
        "bare_calls_per_second": round(comparison.medians["reference"], 1),
        "ratio": round(comparison.ratio, 4),
        "calls_per_second_of_two_threads": round(together, 1),
        "moves_per_second": round(moved, 1),
        "num_envs": num_envs,
    }


def _ours(agent: Agent, params: Params, timestep: TimeStep, num_envs: int) -> Act:
    source = FixedParams(params)
    inferencer = Inferencer(InferencerConfig(), agent, source, num_envs, jax.random.PRNGKey(1))
    return lambda: inferencer.inference(None, timestep)


def _bare(agent: Agent, params: Params, timestep: TimeStep, num_envs: int) -> Act:
    """Returns a call with the observations in numpy that gives only actions."""
    key, state = jax.random.PRNGKey(1), jax.jit(agent.initial_state, static_argnums=0)(num_envs)
    step = jax.jit(lambda *arguments: agent.actor_step(*arguments)[0].action)
    return lambda: np.asarray(step(key, params, timestep, state))


def _move(timestep: TimeStep) -> None:
    jax.block_until_ready(jax.device_put(timestep))


def _repeat(calls: int, act: Act) -> None:
    for _ in range(calls):
        act()
