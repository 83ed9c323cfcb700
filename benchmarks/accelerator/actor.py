"""Acting on JAX's default device, against a bare jitted call, and in two threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.settings import atari_spec, experiment_of, is_atari
from benchmarks.learners import random_batch
from benchmarks.report import alternate, rate
from programs.components.agent import make_agent
from programs.components.environments import environment_spec
from rlstack.acting.actor import transition_spec
from rlstack.acting.inference import InferencerConfig
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.agent import Agent
from rlstack.types import Params, TimeStep

Act = Callable[[], Any]  # acts once and waits for the actions


def actor(name: str, quick: bool) -> dict[str, Any]:
    """Calls per second for the environments of one actor, and how long their observations move."""
    experiment = experiment_of(name)
    spec = atari_spec() if is_atari(experiment) else environment_spec(experiment)
    agent, num_envs = make_agent(experiment, spec), experiment.env.num_envs
    params = jax.jit(agent.initial_params)(jax.random.PRNGKey(0))
    batch = random_batch(transition_spec(agent, spec), 1, num_envs)
    timestep = jax.tree.map(lambda x: np.ascontiguousarray(x[0]), batch.trajectory.timestep)
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
    return {
        "calls_per_second": round(comparison.medians["ours"], 1),
        "bare_calls_per_second": round(comparison.medians["reference"], 1),
        "ratio": round(comparison.ratio, 4),
        "calls_per_second_of_two_threads": round(_together(ours, calls), 1),
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


def _together(acts: list[Act], calls: int) -> float:
    """Returns the calls per second of all, each in a thread of its own."""
    threads = [threading.Thread(target=_repeat, args=(calls, act), daemon=True) for act in acts]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return calls * len(acts) / (time.monotonic() - begun)
