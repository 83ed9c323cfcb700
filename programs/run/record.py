"""Plays episodes with the newest params of a run and writes them to a dataset."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from rlstack.acting.actor import Actor
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.configs.acting import InferencerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_evaluation_env
from rlstack.programs.build.restored import counts_at, newest_checkpoint, read_params
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.storage import checkpoint
from rlstack.storage.datasets import DatasetWriter, Header

Policy = Literal["greedy", "explore"]


def record(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    frames: int = 20_000,
    policy: Policy = "greedy",
    seed: int | None = None,
) -> tuple[Path, Header]:
    """Writes a dataset of whole episodes in the environments of the run's evaluation.

    Args:
      run_dir: the directory of a run with a checkpoint.
      out: a new or empty directory; by default ``dataset`` in the run directory.
      frames: minimum number of environment steps; every episode that was started is finished. It
        also limits the number of environments, to one per thousand frames.
      policy: "greedy" takes the best action; "explore" explores as at the end of training.
      seed: seed of environments and exploration; the run's seed by default. The random numbers
        differ from those of training and evaluation with the same seed.

    Returns:
      The dataset's directory and its header.

    Raises:
      ValueError: there is no run or no checkpoint, or the directory is not empty.
      rlstack.storage.datasets.DatasetWriteError: a file cannot be written; no files are left.
      rlstack.programs.session.signals.Interrupted: SIGINT or SIGTERM was received; no files are
        left.
    """
    directory = RunDir.open(run_dir)
    experiment = _recorded_experiment(read_config(directory), frames, seed)
    saved = newest_checkpoint(directory, experiment)
    trained_frames = int(checkpoint.read_metadata(saved)["env_frames"])
    path = Path(out) if out is not None else directory.path / "dataset"
    source = {
        "run": str(directory.path),
        "preset": experiment.preset,
        "agent": type(experiment.agent).__name__,
        "policy": policy,
        "trained_frames": trained_frames,
        "seed": experiment.seed,
    }
    with (
        make_evaluation_env(experiment, "record") as env,
        StopSignals() as signals,
        DatasetWriter(
            path, env.spec, env.num_envs, frames, env=_env_header(experiment), source=source
        ) as writer,
    ):
        after = counts_at(saved, experiment.total_envs)
        agent = make_agent(experiment, env.spec, greedy=policy == "greedy", after=after)
        params = read_params(saved, experiment, env.spec)
        key = role_key(experiment.seed, "record")
        inferencer = Inferencer(InferencerConfig(), agent, FixedParams(params), env.num_envs, key)
        actor = Actor(env, inferencer, writer)
        while not writer.done:
            actor.step()
            if signals.received is not None:
                raise Interrupted(signals.received, saved=False)
        return path.absolute(), writer.finish()


def _recorded_experiment(experiment: Experiment, frames: int, seed: int | None) -> Experiment:
    """Returns the experiment with the seed, and with few environments for few frames.

    Every environment finishes its episode, so many environments would record too many frames.
    """
    num_envs = max(1, min(experiment.evaluator.num_envs, -(-frames // 1000)))
    evaluator = dataclasses.replace(experiment.evaluator, num_envs=num_envs, episodes=num_envs)
    seed = experiment.seed if seed is None else seed
    return dataclasses.replace(experiment, evaluator=evaluator, seed=seed)


def _env_header(experiment: Experiment) -> dict[str, object]:
    """Returns the header's entry on the environments, which are those of evaluation."""
    cfg = experiment.env
    options = {**cfg.options, **cfg.eval_options}
    return {"name": cfg.name, "type": cfg.type, "options": options}
