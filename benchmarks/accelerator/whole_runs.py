"""Whole runs on JAX's default device, measured once their functions have been compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from benchmarks.accelerator.settings import experiment_of, for_many_cores, in_topology
from rlstack.acting.inferencer import Inferencer
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.program_config import Topology
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.run import train

Found = dict[str, Any]


def actors(name: str, quick: bool, acting: Literal["own", "shared"] = "own") -> Found:
    """Steps per second of heavy_env with several numbers of actors, and how long a call takes.

    Each acts for itself, or one thread acts for all.
    """
    found: Found = {"frames_per_second": {}, "inference_ms": {}}
    numbers = (2, 3, 4) if acting == "own" else (2, 4, 8)
    for number in numbers[:1] if quick else numbers:
        chosen = in_topology(experiment_of(name), "heavy_env", actors=number)
        program = dataclasses.replace(chosen.program, acting=acting)
        chosen = dataclasses.replace(chosen, program=program)
        with _timed_calls() as seconds:
            run = trained(chosen, 0.5 if quick else 12)
        found["num_envs"] = run["num_envs"]
        found["frames_per_second"][str(number)] = run["frames_per_second"]
        # The median leaves out compilation.
        found["inference_ms"][str(number)] = round(1e3 * statistics.median(seconds), 3)
    return found


@contextlib.contextmanager
def _timed_calls() -> Iterator[list[float]]:
    """Times all calls of `Inferencer.inference` in this process; yields the list of seconds."""
    seconds: list[float] = []
    inference = Inferencer.inference

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = inference(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    Inferencer.inference = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Inferencer.inference = inference  # type: ignore[method-assign]


def layouts(name: str, quick: bool) -> Found:
    """Steps per second of heavy_env with several numbers of actors, and pools of other settings.

    A pool has as many threads as there are cores, or its part of the cores, and its batches have
    all of its environments or a share of them.
    """
    experiment, found, cores = experiment_of(name), {}, os.cpu_count() or 1
    for number, share, divided in _LAYOUTS[:2] if quick else _LAYOUTS:
        workers = max(1, cores // number) if divided else 0
        chosen = in_topology(experiment, "heavy_env", share, number, workers)
        run = trained(chosen, 0.5 if quick else 8)
        threads = workers or cores
        found[f"actors {number}, threads {threads}, share {share:g}"] = run["frames_per_second"]
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
    return trained(experiment, 0.5 if quick else 12)


def fused(name: str, quick: bool) -> Found:
    """Steps per second of a fused run, without compilation."""
    experiment = experiment_of(name)
    if not quick and experiment.replay.sampler == "fifo":
        experiment = for_many_cores(experiment)
    return trained(experiment, seconds=0.5 if quick else 10)


def run(name: str, quick: bool) -> Found:
    """Steps per second of a run with EnvPool in a single process, without compilation."""
    return trained(experiment_of(name), seconds=0.5 if quick else 12)


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


def trained(experiment: Experiment, seconds: float) -> Found:
    """Trains until ``seconds`` after the first update; returns the measurements of that time."""
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
        **memory(),
    }


def memory() -> Found:
    """Returns the peak memory of the device, or nothing if the device does not count it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return {} if peak is None else {"peak_bytes": int(peak)}
