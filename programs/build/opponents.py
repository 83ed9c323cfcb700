"""Frozen opponents: checkpoints of runs that play some of the places of another run's games."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.configs.acting import InferencerConfig
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.opponents import (
    AsyncEnvWithOpponents,
    Seating,
    SyncEnvWithOpponents,
    assign_seats,
)
from rlstack.envs.seats.joint import workers_of_games
from rlstack.envs.seats.showing import JOINT
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.restored import counts_at, newest_checkpoint, read_params
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.env_config import EnvConfig, OpponentsConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint, files
from rlstack.types import EnvSpec, PyTree, TimeStep


def resolved(experiment: Experiment) -> Experiment:
    """Returns the experiment with each opponent's run replaced by its newest checkpoint.

    The opponents then stay the same when the experiment is resumed, from any folder.

    Raises:
      ValueError: an opponent's directory is not a run, or the run has no checkpoint.
    """
    env = experiment.env
    found = {
        field: dataclasses.replace(
            cfg, runs=tuple(str(checkpoint_of(run, f"env.{field}")) for run in cfg.runs)
        )
        for field in ("opponents", "eval_opponents")
        if (cfg := getattr(env, field)).runs
    }
    return dataclasses.replace(experiment, env=dataclasses.replace(env, **found))


def check_shares(cfg: EnvConfig, where: str) -> None:
    """Checks that the environments can be divided among the opponents.

    Raises:
      ValueError: the environments cannot be divided; the message names `where`, the config field.
    """
    share, against = cfg.opponents.share, _seating(cfg).against
    opposed = int((against >= 0).sum())
    if abs(opposed - share * cfg.num_envs) > 1e-6:
        raise ValueError(
            f"{where}: share must leave whole games of {_agents(cfg)} agents to the learner alone; "
            f"got {share:g} of {cfg.num_envs} environments. The next share that does is "
            f"{opposed / cfg.num_envs:g}."
        )
    if opposed < len(cfg.opponents.runs):
        raise ValueError(
            f"{where}: each of the {len(cfg.opponents.runs)} opponents must have an environment; "
            f"got {opposed} environments with opponents. Raise num_envs or share."
        )


def config_of_games(cfg: EnvConfig) -> EnvConfig:
    """Returns the config of the pool of whole games: with the opponents' places, in all games."""
    num_seats = len(_seating(cfg).players)
    return dataclasses.replace(
        cfg,
        num_envs=num_seats,
        wait_num=1 if cfg.wait_num else 0,
        num_workers=workers_of_games(cfg.type, cfg.num_workers, num_seats // _agents(cfg)),
        opponents=OpponentsConfig(),
    )


def add_opponents(
    pool: SyncEnv | AsyncEnv, cfg: EnvConfig, seed: int
) -> SyncEnvWithOpponents | AsyncEnvWithOpponents:
    """Returns the pool with opponents in their places; only the learner's places remain.

    Args:
      pool: made from `config_of_games`.
      cfg: the config, with opponents.
      seed: seed of the opponents' random numbers.

    Raises:
      ValueError: a checkpoint is missing, or its agent does not fit the environments.
    """
    seating, runs = _seating(cfg), cfg.opponents.runs
    opponents = [
        _Frozen(run, pool.spec, cfg.opponents, int((seating.players == i).sum()), seed, i)
        for i, run in enumerate(runs)
    ]
    names = _names(runs)
    if isinstance(pool, AsyncEnv):
        return AsyncEnvWithOpponents(pool, seating, opponents, names, cfg.wait_num)
    return SyncEnvWithOpponents(pool, seating, opponents, names)


class _Frozen:
    """An agent at a checkpoint, as a `rlstack.envs.opponents.Opponent`."""

    def __init__(
        self, run: str, spec: EnvSpec, cfg: OpponentsConfig, num_seats: int, seed: int, number: int
    ) -> None:
        path = checkpoint_of(run, "env.opponents")
        experiment = read_config(RunDir.open(run_of(path)))
        try:
            self._params = read_params(path, experiment, spec, on_host=True)
            after = counts_at(path, experiment)
            self._agent = make_agent(experiment, spec, greedy=cfg.greedy, after=after)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"env.opponents: {run} must have an agent that fits these environments; {error}"
            ) from error
        self._num_seats, self._seed, self._number = num_seats, seed, number
        self._inferencer: Inferencer | None = None  # made when needed, since it occupies a device

    def __call__(self, seats: np.ndarray | None, timestep: TimeStep) -> PyTree:
        if self._inferencer is None:
            params = FixedParams(jax.tree.map(jnp.asarray, self._params))
            key = role_key(self._seed, "opponent", self._number)
            self._inferencer = Inferencer(
                InferencerConfig(), self._agent, params, self._num_seats, key
            )
        return self._inferencer.inference(seats, timestep).agent_output.action


def checkpoint_of(run: str | os.PathLike[str], field: str) -> Path:
    """Returns the path of a checkpoint: the one given, or the newest one of a run.

    Raises:
      ValueError: there is no checkpoint; the message names `field`, the config field of the run.
    """
    path = files.local(run).absolute()
    try:
        if path.name == "best" and path.parent.name == "checkpoints":
            path = checkpoint.latest(path) or path
        if "checkpoints" in (path.parent.name, path.parent.parent.name) and path.is_dir():
            checkpoint.read_metadata(path)
            return path
        directory = RunDir.open(path)
        return newest_checkpoint(directory, read_config(directory, several=True))
    except ValueError as error:
        raise ValueError(f"{field}: {run} must be a run or a checkpoint of one; {error}") from error


def run_of(path: Path) -> Path:
    """Returns the run directory of a checkpoint."""
    return path.parents[2] if path.parent.name == "best" else path.parents[1]


def _names(runs: tuple[str, ...]) -> list[str]:
    """Returns NAME@FRAMES for each, or whole paths if two of those are equal."""
    paths = [checkpoint_of(run, "env.opponents") for run in runs]
    told = [checkpoint.read_metadata(path) for path in paths]
    frames = [metadata.get("env_frames", metadata["step"]) for metadata in told]
    names = [f"{run_of(path).name}@{n}" for path, n in zip(paths, frames, strict=True)]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _seating(cfg: EnvConfig) -> Seating:
    return assign_seats(cfg.num_envs, _agents(cfg), len(cfg.opponents.runs), cfg.opponents.share)


def _agents(cfg: EnvConfig) -> int:
    """Returns the number of agents in one game."""
    if cfg.options.get(JOINT):
        raise ValueError("env.opponents: joint must be left out, because opponents play seats.")
    agents: Any = cfg.options.get("agents", 1)
    if not isinstance(agents, int) or agents < 2:
        raise ValueError(
            f"env.opponents: {cfg.name} must be a game of several agents, with an option "
            f"agents; got agents = {agents!r}. Set --env.options agents N."
        )
    return agents
