"""A program of several nodes, from start to result: launched, watched, and cleared away."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import TextIO

from programs import launchers
from programs.build.components import announce_replay
from programs.build.environments import make_env
from programs.experiment import Experiment
from programs.nodes.base import Setup
from programs.tracking.display import ProgressDisplay
from programs.tracking.result import Result
from programs.tracking.run_dir import RunDir
from programs.tracking.signals import Interrupted
from rlstack.storage import checkpoint
from rlstack.types import EnvSpec


class ProgramError(RuntimeError):
    """A node failed for good and ended its program; the message has the node's error."""


def run_program(
    experiment: Experiment, directory: RunDir, restored: Path | None, stream: TextIO | None
) -> Result:
    """Runs a topology of several nodes.

    Args:
      experiment: what to run.
      directory: where everything is filed.
      restored: the checkpoint to go on from, if any.
      stream: where progress is shown; standard error by default.

    Raises:
      ValueError: a package is missing, or the config contradicts itself or the environment.
      ProgramError: a node failed that cannot be restarted, or was restarted too often.
      Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    _check_packages(experiment)
    spec = _environment_spec(experiment)
    # An agent that does not fit, or too large a replay, is refused here, before any launch.
    setup = Setup(experiment, directory, spec, restored)
    announce_replay(experiment, setup.step, stream or sys.stderr)
    frames = checkpoint.read_metadata(restored)["env_frames"] if restored else 0
    directory.failures.unlink(missing_ok=True)
    directory.result.unlink(missing_ok=True)
    display = ProgressDisplay(experiment.frames, stream or sys.stderr, start_frames=frames)
    with display:
        received = launchers.launch(setup, experiment.program.launch, display)
    if directory.result.exists():
        return Result(**json.loads(directory.result.read_text()))
    if received:
        raise Interrupted(received, saved=checkpoint.latest(directory.checkpoints) is not None)
    raise ProgramError(_first_failure(directory))


def _check_packages(experiment: Experiment) -> None:
    needed = {"launchpad", "courier"}
    if experiment.topology == "distributed":
        needed.add("reverb")
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        raise ValueError(
            f"topology {experiment.topology}: it needs {', '.join(missing)}, which are for CPython "
            "3.10; not installed here. `make venv` sets that up; `rlstack doctor` tells more. "
            "--topology single_process works without."
        )
    if experiment.program.launch == "ray":
        from programs.launchers import ray_cluster

        ray_cluster.load()


def _environment_spec(experiment: Experiment) -> EnvSpec:
    with make_env(dataclasses.replace(experiment.env, num_envs=1, wait_num=0), seed=0) as env:
        return env.spec


def _first_failure(directory: RunDir) -> str:
    """Returns what ended the program: the first failure after which there was no restart."""
    failures = []
    if directory.failures.exists():
        failures = [json.loads(line) for line in directory.failures.read_text().splitlines()]
    for failure in failures:
        if not failure["restarts"]:
            return (
                f"node {failure['node']} failed: {failure['reason']}. "
                f"What it printed is under {directory.node_logs}.\n"
                f"{failure.get('traceback', '')}".rstrip()
            )
    log = directory.node_logs / "launcher"
    told = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return f"the program ended without a result; see {directory.node_logs}.\n{told}".rstrip()
