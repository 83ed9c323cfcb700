"""One part of the benchmark, in a process of its own; see `benchmarks.accelerator`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks import learners
from benchmarks.accelerator import correctness, service
from benchmarks.accelerator.actor import actor
from benchmarks.accelerator.settings import experiment_of, spec_of
from benchmarks.accelerator.whole_runs import Found, actors, fused, layouts, many, memory, run
from benchmarks.report import alternate, rate
from rlstack.acting.actor import transition_spec
from rlstack.envs import AsyncEnv
from rlstack.learning.learner import Learner
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.experiment import Experiment


def learner(name: str, quick: bool, *, runs: bool = False) -> Found:
    """The learner's updates per second against those of a bare jitted loop."""
    experiment = experiment_of(name)
    repeats, seconds = (2, 0.1) if quick else (5, 1.0)
    comparison = learners.compare(experiment, spec_of(experiment), repeats, seconds, runs=runs)
    ours, bare = comparison.medians["ours"], comparison.medians["reference"]
    return {
        "updates_per_second": round(ours, 2),
        "bare_updates_per_second": round(bare, 2),
        "ratio": round(comparison.ratio, 4),
        "spread": [round(x, 4) for x in comparison.spread],
        **memory(),
    }


def bfloat16(name: str, quick: bool) -> Found:
    """Updates per second with layers in bfloat16 against those in float32."""
    chosen = experiment_of(name)
    network = dataclasses.replace(chosen.network, dtype="bfloat16")
    mixed = dataclasses.replace(chosen, network=network)
    sides = [_updates(experiment) for experiment in (mixed, chosen)]
    for side in sides:
        side(2)
    updates = max(2, int((0.1 if quick else 1.0) * rate(2, lambda: sides[1](2))))
    comparison = alternate(
        lambda: rate(updates, lambda: sides[0](updates)),
        lambda: rate(updates, lambda: sides[1](updates)),
        2 if quick else 5,
    )
    return {
        "updates_per_second": round(comparison.medians["ours"], 2),
        "float32_updates_per_second": round(comparison.medians["reference"], 2),
        "ratio": round(comparison.ratio, 4),
        **memory(),
    }


def _updates(experiment: Experiment) -> Callable[[int], None]:
    spec = spec_of(experiment)
    agent = make_agent(experiment, spec)
    cfg, step = experiment.replay, transition_spec(agent, spec)
    sample = learners.random_sample(step, cfg.unroll_length + 1, cfg.batch_size)
    made = Learner(experiment.learner, agent, None, jax.random.PRNGKey(0))

    def run(updates: int) -> None:
        for _ in range(updates):
            made.step(sample)

    return run


def pool(name: str, quick: bool) -> Found:
    """Steps per second of environments with random actions, a limit of every run with them."""
    experiment = experiment_of(name)
    cfg = experiment.env
    num_envs = 8 if quick else cfg.num_envs * experiment.num_actors
    seconds = 0.2 if quick else 5.0
    return {
        "frames_per_second": round(_stepped(cfg, num_envs, num_envs, seconds), 1),
        "half_frames_per_second": round(_stepped(cfg, num_envs, num_envs // 2, seconds), 1),
        "num_envs": num_envs,
        "cores": os.cpu_count(),
    }


def _stepped(cfg: EnvConfig, num_envs: int, wait_num: int, seconds: float) -> float:
    """Returns the steps per second in batches of the first ``wait_num`` environments."""
    draw = np.random.default_rng(0)
    with AsyncEnv(cfg.name, num_envs, wait_num, seed=1, options=dict(cfg.options)) as envs:
        action = envs.spec.action
        envs.async_reset()
        begun, steps = 0.0, 0
        while not begun or time.monotonic() - begun < seconds:
            env_ids, _ = envs.recv()
            envs.send(env_ids, draw.integers(0, action.num_values, wait_num, action.dtype))
            steps += wait_num
            if not begun and steps >= 10 * num_envs:
                begun, steps = time.monotonic(), 0
        return steps / (time.monotonic() - begun)


def _missing(kind: str, name: str) -> str:
    """Returns why a part cannot run here, or an empty string."""
    needed = "envpool" if kind in _WITH_ENVPOOL else _PACKAGES.get(name.split("-")[0], "")
    try:
        importlib.import_module(needed or "jax")
    except ImportError as error:  # its own packages may be missing too
        return f"{needed} cannot be imported: {error}"
    return ""


_PACKAGES = {"gymnax": "gymnax", "minatar": "gymnax", "brax": "brax"}  # of presets with this prefix
_WITH_ENVPOOL = (
    "run",
    "pool",
    "single_process",
    "heavy_env",
    "heavy_env_half",
    "layouts",
    "actors",
    "actors_shared",
    "actors_without_cuda_graphs",
    "light_env",
)
_KINDS: dict[str, Callable[[str, bool], Found]] = {
    "updates": correctness.updates,
    "acting": correctness.acting,
    "checkpoint": correctness.checkpoint_moves,
    "repeats": correctness.repeats,
    "repeats_with_deterministic_ops": correctness.repeats,  # `parts` has the flag
    "actor": actor,
    "learner": learner,
    "learner_run": functools.partial(learner, runs=True),
    "bfloat16": bfloat16,
    "fused": fused,
    "run": run,
    "pool": pool,
    "single_process": functools.partial(many, topology="single_process"),
    "heavy_env": functools.partial(many, topology="heavy_env"),
    "heavy_env_half": functools.partial(many, topology="heavy_env", share=0.5),
    "layouts": layouts,
    "actors": actors,
    "actors_shared": functools.partial(actors, acting="shared"),
    "actors_without_cuda_graphs": actors,  # `parts` has the flag
    "light_env": functools.partial(many, topology="light_env"),
    "service": service.latency,
}


def main() -> None:
    """Runs the part that the command names; the last line of output is a JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    kind, _, name = chosen.part.partition("/")
    if missing := _missing(kind, name):
        print(json.dumps({"skipped": missing}))
        return
    experiment = experiment_of(name) if name else None
    xla.configure(convolutions=experiment is None or not experiment.older_runtime)
    found = _KINDS[kind](name, chosen.quick)
    device = jax.local_devices()[0]
    print(json.dumps({"device": f"{device.platform}: {device.device_kind}", **found}))


if __name__ == "__main__":
    main()
