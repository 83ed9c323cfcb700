"""Plays the newest params of a run and writes down what happens, as a dataset."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from programs.build.components import make_agent
from programs.build.environments import make_evaluation_env
from programs.build.restored import newest_checkpoint, read_config, read_params
from programs.build.seeds import role_key
from programs.experiment import Experiment
from programs.tracking.run_dir import RunDir
from programs.tracking.signals import Interrupted, StopSignals
from rlstack.acting.actor import Actor
from rlstack.acting.inferencer import Inferencer, InferencerConfig
from rlstack.acting.params import FixedParams
from rlstack.exploration import Counts
from rlstack.storage import checkpoint
from rlstack.storage.datasets import DatasetWriter, Header

Played = Literal["greedy", "explore"]


def record(
    run_dir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    frames: int = 20_000,
    policy: Played = "greedy",
    seed: int | None = None,
) -> tuple[Path, Header]:
    """Writes a dataset of whole episodes, played as the evaluation of the run plays them.

    Args:
      run_dir: of a run with a checkpoint.
      out: a new or empty directory; by default ``dataset`` in the run's.
      frames: environment steps, at least: every episode that has begun is played to its end. Of
        the evaluation's environments at most one a thousand frames plays.
      policy: whether to take the best action, or to explore as at the end of training.
      seed: of environments and exploration; the run's own by default. Neither starts as training
        or evaluation do with it.

    Returns:
      The dataset's directory and its header.

    Raises:
      ValueError: there is no run or no checkpoint, or the directory holds something.
      rlstack.storage.datasets.DatasetWriteError: the file system refuses; nothing is left behind.
      programs.tracking.signals.Interrupted: SIGINT or SIGTERM came; nothing is left behind.
    """
    directory = RunDir.open(run_dir)
    experiment = _played(read_config(directory), frames, seed)
    restored = newest_checkpoint(directory, experiment)
    trained = int(checkpoint.read_metadata(restored)["env_frames"])
    path = Path(out) if out is not None else directory.path / "dataset"
    source = {
        "run": str(directory.path),
        "preset": experiment.preset,
        "agent": type(experiment.agent).__name__,
        "policy": policy,
        "trained_frames": trained,
        "seed": experiment.seed,
    }
    with (
        make_evaluation_env(experiment, "record") as env,
        StopSignals() as signals,
        DatasetWriter(
            path, env.spec, env.num_envs, frames, env=_played_env(experiment), source=source
        ) as writer,
    ):
        agent = make_agent(experiment, env.spec, greedy=policy == "greedy")
        params = read_params(restored, experiment, env.spec)
        key = role_key(experiment.seed, "record")
        inferencer = Inferencer(InferencerConfig(), agent, FixedParams(params), env.num_envs, key)
        _go_on(inferencer, trained // experiment.total_envs)
        actor = Actor(env, inferencer, writer)
        while not writer.done:
            actor.step()
            if signals.received is not None:
                raise Interrupted(signals.received, saved=False)
        return path.absolute(), writer.finish()


def _played(experiment: Experiment, frames: int, seed: int | None) -> Experiment:
    """The experiment as it is played: from its seed, few frames in few environments.

    Each environment plays on to the end of its episode.
    """
    num_envs = max(1, min(experiment.evaluator.num_envs, -(-frames // 1000)))
    evaluator = dataclasses.replace(experiment.evaluator, num_envs=num_envs, episodes=num_envs)
    seed = experiment.seed if seed is None else seed
    return dataclasses.replace(experiment, evaluator=evaluator, seed=seed)


def _played_env(experiment: Experiment) -> dict[str, Any]:
    """The environments of an evaluation, as a header names them."""
    cfg = experiment.env
    options = {**cfg.options, **cfg.eval_options}
    return {"name": cfg.name, "type": cfg.type, "options": options}


def _go_on(inferencer: Inferencer, env_steps: int) -> None:
    """Sets counters of environments as after so many steps, since exploration falls with them."""

    def counted(node: Any) -> Any:
        if isinstance(node, Counts):
            return node._replace(env_steps=jnp.full_like(node.env_steps, np.int32(env_steps)))
        return node

    saved = inferencer.save()
    table = jax.tree.map(counted, saved["table"], is_leaf=lambda node: isinstance(node, Counts))
    inferencer.load({**saved, "table": table})
