"""The latency of an inference service on JAX's default device, with callers in threads."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.settings import experiment_of, spec_of
from benchmarks.learners import random_timestep
from benchmarks.report import at_once
from rlstack.acting.actor import transition_spec
from rlstack.acting.batches import padded_sizes
from rlstack.acting.inference_service import InferenceService
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.configs.acting import ServiceConfig
from rlstack.programs.build.agent import make_agent
from rlstack.types import TimeStep


def latency(name: str, quick: bool) -> dict[str, Any]:
    """Serves eight callers with sixteen environments each: PPO's network for Atari."""
    del name
    callers, num_envs = (2, 4) if quick else (8, 16)
    experiment = experiment_of("cartpole-ppo" if quick else "pong-ppo")
    spec = spec_of(experiment)
    agent = make_agent(experiment, spec)
    params = jax.jit(agent.initial_params)(jax.random.PRNGKey(0))
    total = callers * num_envs
    cfg = ServiceConfig(max_batch=total)
    inferencer = Inferencer(cfg, agent, FixedParams(params), total, jax.random.PRNGKey(1))
    timesteps = random_timestep(transition_spec(agent, spec), total)
    _compile(inferencer, timesteps, cfg.max_batch)
    timestep = _rows(timesteps, slice(num_envs))
    service = InferenceService(cfg, inferencer)
    times: list[float] = []

    def call(rank: int, until: float, measured: bool) -> None:
        ids = np.arange(rank * num_envs, (rank + 1) * num_envs, dtype=np.int32)
        while (begun := time.perf_counter()) < until:
            service.inference(str(rank), 0, ids, timestep)
            if measured:
                times.append(time.perf_counter() - begun)

    def run(seconds: float, *, measured: bool) -> float:
        begun = time.perf_counter()
        at_once(
            [functools.partial(call, rank, begun + seconds, measured) for rank in range(callers)]
        )
        return time.perf_counter() - begun

    try:
        run(0.1 if quick else 1.0, measured=False)  # the first calls
        seconds = run(0.3 if quick else 5.0, measured=True)
    finally:
        service.close()
    p50, p99 = np.percentile(times, (50, 99))
    return {
        "latency_ms_p50": round(1e3 * float(p50), 3),
        "latency_ms_p99": round(1e3 * float(p99), 3),
        "envs_per_second": round(len(times) * num_envs / seconds, 1),
        "callers": callers,
        "num_envs": num_envs,
    }


def _compile(inferencer: Inferencer, timesteps: TimeStep, max_batch: int) -> None:
    """Acts once on a batch of each size that a service makes, whole and with padding."""
    total = len(timesteps.step_type)
    inferencer.inference(None, timesteps)
    for size in padded_sizes((), max_batch, total):
        rows = slice(total - size, total)
        ids = np.arange(rows.start + 1, total + 1, dtype=np.int32)  # the last one is padding
        inferencer.inference(ids, _rows(timesteps, rows))


def _rows(timesteps: TimeStep, rows: slice) -> TimeStep:
    return jax.tree.map(lambda x: x[rows], timesteps)
