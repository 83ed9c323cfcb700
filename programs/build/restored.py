"""Reads a finished run: its config, its newest checkpoint and the params in it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax
import numpy as np

from rlstack.exploration import RunCounts
from rlstack.programs.build.agent import make_agent
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session import origin
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from rlstack.types import EnvSpec, Params

Which = Literal["last", "best"]


def newest_checkpoint(directory: RunDir, experiment: Experiment) -> Path:
    """Returns the path of a run's newest checkpoint of which the params are undamaged.

    Raises:
      ValueError: the run has no such checkpoint.
    """
    part = "['learner']['params']"
    try:
        found = checkpoint.newest_intact(directory.newest_checkpoints, part=part)
    except checkpoint.DamagedError:
        if not directory.is_stored:
            raise
        found = checkpoint.newest_intact(directory.checkpoints, part=part)
    return require_checkpoint(directory, experiment, found)


def chosen_checkpoint(directory: RunDir, experiment: Experiment, which: Which) -> Path:
    """Returns the path of the checkpoint from which a command reads params.

    Args:
      directory: the run's directory.
      experiment: the run's experiment.
      which: "last" for the newest checkpoint, "best" for the one with the best return in an
        evaluation.

    Raises:
      ValueError: the run has no such checkpoint.
    """
    if which == "last":
        return newest_checkpoint(directory, experiment)
    path = checkpoint.newest_intact(directory.best)
    if path is None:
        raise ValueError(
            f"{directory.path} has no best checkpoint, because no evaluation of it has ended. "
            "Use --params last, or train with --evaluator.period FRAMES."
        )
    origin.check(directory, path)
    return path


def require_checkpoint(directory: RunDir, experiment: Experiment, path: Path | None) -> Path:
    """Returns the path of a checkpoint, after a check that it exists and belongs to the run.

    Raises:
      ValueError: the path is None, or the checkpoint belongs to another run.
    """
    if path is None:
        raise ValueError(
            f"{directory.path} has no checkpoint to read. Start the run again with "
            f"rlstack train {experiment.preset}."
        )
    origin.check(directory, path)
    return path


def counts_at(path: Path, experiment: Experiment, num_envs: int = 0) -> RunCounts:
    """Returns the mean number of steps and episodes per environment of a run at a checkpoint.

    Args:
      path: path of the checkpoint.
      experiment: the run's experiment.
      num_envs: number of the run's environments whose steps count as frames; 0 for all.
    """
    metadata = checkpoint.read_metadata(path)
    frames = int(metadata.get("env_frames", metadata["step"]))
    return run_counts(
        experiment, frames, metadata.get("episodes"), num_envs or experiment.total_envs
    )


def run_counts(
    experiment: Experiment, frames: int, episodes: int | None, num_envs: int
) -> RunCounts:
    """Returns the mean number of steps and episodes per environment of a run.

    Args:
      experiment: the run's experiment.
      frames: the frames of the run, with those that it learned from before it acted.
      episodes: its episodes; None if they are not known.
      num_envs: number of the run's environments whose steps count as frames.
    """
    acted = max(0, frames - (experiment.all_frames - experiment.frames))
    return RunCounts(acted // num_envs, None if episodes is None else int(episodes) // num_envs)


def read_params(
    path: Path, experiment: Experiment, spec: EnvSpec, *, on_host: bool = False, policy: str = ""
) -> Params:
    """Reads the params of a checkpoint.

    Args:
      path: path of the checkpoint.
      experiment: the run's experiment, or the policy's own one if the run trained several.
      spec: the spec of the environments.
      on_host: True to return numpy arrays, which use no device memory.
      policy: name of the policy, if the run trained several.
    """
    agent = make_agent(experiment, spec, greedy=True)  # has the params of one that explores
    params = jax.eval_shape(agent.initial_params, jax.eval_shape(jax.random.PRNGKey, 0))
    if on_host:
        params = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), params)
    named = {policy: params} if policy else params
    with origin.compared(_run_of(path), path):
        saved = checkpoint.restore(path, {"learner": {"params": named}}, partial=True)
    found = saved["learner"]["params"]
    return found[policy] if policy else found


def _run_of(path: Path) -> RunDir:
    """Returns the directory of the run that a checkpoint, or the best one, is in."""
    folder = path.parent.parent
    return RunDir(folder.parent if folder.name == "checkpoints" else folder)
