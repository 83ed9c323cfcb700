"""One part of the benchmark, in a process of its own; see `benchmarks.accelerator`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import learners
from benchmarks.accelerator import correctness, service
from benchmarks.accelerator.actor import actor
from benchmarks.accelerator.settings import (
    experiment_of,
    for_many_cores,
    in_topology,
    spec_of,
)
from benchmarks.report import alternate, rate
from programs.components import xla
from programs.components.agent import make_agent
from programs.env_config import EnvConfig
from programs.experiment import Experiment
from programs.program_config import Topology
from programs.run import train
from programs.stop_config import StopConfig
from rlstack.acting.actor import transition_spec
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.envs import AsyncEnv
from rlstack.learning.learner import Learner

Found = dict[str, Any]


def learner(name: str, quick: bool) -> Found:
    """The learner's updates per second against those of a bare jitted loop."""
    experiment = experiment_of(name)
    repeats, seconds = (2, 0.1) if quick else (5, 1.0)
    comparison = learners.compare(experiment, spec_of(experiment), repeats, seconds)
    ours, bare = comparison.medians["ours"], comparison.medians["reference"]
    return {
        "updates_per_second": round(ours, 2),
        "bare_updates_per_second": round(bare, 2),
        "ratio": round(comparison.ratio, 4),
        "spread": [round(x, 4) for x in comparison.spread],
        **_memory(),
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
        **_memory(),
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


def layouts(name: str, quick: bool) -> Found:
    """Steps per second of heavy_env with several numbers of actors, and pools of other settings.

    A pool has as many threads as there are cores, or its part of the cores, and its batches have
    all of its environments or a share of them.
    """
    experiment, found, cores = experiment_of(name), {}, os.cpu_count() or 1
    for actors, share, divided in _LAYOUTS[:2] if quick else _LAYOUTS:
        workers = max(1, cores // actors) if divided else 0
        chosen = in_topology(experiment, "heavy_env", share, actors, workers)
        run = _trained(chosen, 0.5 if quick else 8)
        threads = workers or cores
        found[f"actors {actors}, threads {threads}, share {share:g}"] = run["frames_per_second"]
    return found


# Numbers of actors, shares of their environments in a batch, whether pools divide the cores.
_LAYOUTS = (
    (2, 1.0, False),
    (2, 0.5, False),
    (2, 1.0, True),
    (2, 0.5, True),
    (3, 0.5, False),
    (4, 0.5, True),
)


def many(name: str, quick: bool, topology: Topology, share: float = 1.0) -> Found:
    """Steps per second of a run of many environments; the arguments are those of `in_topology`."""
    experiment = in_topology(experiment_of(name), topology, share)
    return _trained(experiment, 0.5 if quick else 12)


def fused(name: str, quick: bool) -> Found:
    """Steps per second of a fused run, without compilation."""
    experiment = experiment_of(name)
    if not quick and experiment.replay.sampler == "fifo":
        experiment = for_many_cores(experiment)
    return _trained(experiment, seconds=0.5 if quick else 10)


def run(name: str, quick: bool) -> Found:
    """Steps per second of a run with EnvPool in a single process, without compilation."""
    return _trained(experiment_of(name), seconds=0.5 if quick else 12)


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


_WAITS = ("wait_seconds", "draw_seconds", "device_seconds")


class _Meter:
    """A stop rule that measures a run for some seconds, once the learner has been compiled."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._made = time.monotonic()
        self._seen: list[tuple[float, int, Mapping[str, Any]]] = []  # the first and the last

    def __call__(self, frames: int, logs: Mapping[str, Any]) -> bool:
        if logs.get("learner/steps", 0) >= 1:  # evaluations have no such number
            self._seen[1:] = [(time.monotonic(), frames, dict(logs))]
        return bool(self._seen) and self._seen[-1][0] - self._seen[0][0] >= self._seconds

    def frames_per_second(self) -> float:
        """From the first line of logs that has an update to the last line."""
        (start, first, _), (end, last, _) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start)

    def seconds_to_first_update(self) -> float:
        """Most of them are compilation."""
        return self._seen[0][0] - self._made

    def shares(self) -> dict[str, float]:
        """Fractions of the time in which batches were drawn or nodes waited; sums over nodes."""
        (start, _, first), (end, _, last) = self._seen[0], self._seen[-1]
        names = [name for name in last if name.endswith(_WAITS) and name in first]
        return {name: round((last[name] - first[name]) / (end - start), 4) for name in names}


def _trained(experiment: Experiment, seconds: float) -> Found:
    meter = _Meter(seconds)
    experiment = dataclasses.replace(
        experiment,
        frames=1 << 30,
        evaluator=EvaluatorConfig(episodes=4, num_envs=4, max_steps=200, period="off"),
        stop=StopConfig(factory=lambda: meter),
        loggers=("jsonl",),
        checkpoint_replay=False,
        checkpoint_period=1 << 30,
        log_period=max(1000, experiment.log_period),
    )
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "progress", "w") as stream:
        result = train.run(experiment, Path(folder) / "run", stream=stream)
    return {
        "frames_per_second": round(meter.frames_per_second(), 1),
        "seconds_to_first_update": round(meter.seconds_to_first_update(), 1),
        "frames": result.env_frames,
        "updates": result.learner_steps,
        "shares_of_time": meter.shares(),
        "num_envs": experiment.env.num_envs * experiment.num_actors,
        **_memory(),
    }


def _memory() -> Found:
    """The most memory of the device that was in use, if the device counts it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {} if peak is None else {"peak_bytes": int(peak)}


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
    "light_env",
)
_KINDS: dict[str, Callable[[str, bool], Found]] = {
    "updates": correctness.updates,
    "acting": correctness.acting,
    "checkpoint": correctness.checkpoint_moves,
    "actor": actor,
    "learner": learner,
    "bfloat16": bfloat16,
    "fused": fused,
    "run": run,
    "pool": pool,
    "single_process": functools.partial(many, topology="single_process"),
    "heavy_env": functools.partial(many, topology="heavy_env"),
    "heavy_env_half": functools.partial(many, topology="heavy_env", share=0.5),
    "layouts": layouts,
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
