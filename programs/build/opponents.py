"""Frozen opponents: runs whose params play some places of another run's games, as they are."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from programs.build.components import make_agent
from programs.build.pools import make_pool
from programs.build.restored import newest_checkpoint, read_config, read_params
from programs.build.seeds import role_key
from programs.experiment import EnvConfig, Experiment, OpponentsConfig
from programs.tracking.run_dir import RunDir
from rlstack.acting.inferencer import Inferencer, InferencerConfig
from rlstack.acting.params import FixedParams
from rlstack.envs import AsyncEnv
from rlstack.envs.opponents import (
    AsyncEnvWithOpponents,
    Seating,
    SyncEnvWithOpponents,
    assign_seats,
)
from rlstack.storage import checkpoint
from rlstack.types import EnvSpec, PyTree, TimeStep


def resolved(experiment: Experiment) -> Experiment:
    """Returns the experiment with each opponent's run replaced by its newest checkpoint.

    So that who plays stays the same, also when the experiment is resumed, and from anywhere.

    Raises:
      ValueError: one of them is no run, or has no checkpoint.
    """
    env = experiment.env
    found = {
        field: dataclasses.replace(
            cfg, runs=tuple(str(_checkpoint(run, field)) for run in cfg.runs)
        )
        for field in ("opponents", "eval_opponents")
        if (cfg := getattr(env, field)).runs
    }
    return dataclasses.replace(experiment, env=dataclasses.replace(env, **found))


def check(experiment: Experiment) -> None:
    """Refuses opponents that cannot play these games, before anything is started.

    Raises:
      ValueError: a checkpoint is missing or of an agent that does not fit, the games have no
        places for others, or the environments cannot be shared out as the config says.
    """
    for field, cfg in (
        ("opponents", experiment.env),
        ("eval_opponents", experiment.evaluation_env),
    ):
        if not cfg.opponents.runs:
            continue
        where, share = f"env.{field}", cfg.opponents.share
        against = _seating(cfg).against
        met = int((against >= 0).sum())
        if abs(met - share * cfg.num_envs) > 1e-6:
            agents = _agents(cfg)
            raise ValueError(
                f"{where}: share must leave whole games of {agents} agents to the learner alone; "
                f"got {share:g} of {cfg.num_envs} environments. The next that does is "
                f"{met / cfg.num_envs:g}."
            )
        if met < len(cfg.opponents.runs):
            raise ValueError(
                f"{where}: each of the {len(cfg.opponents.runs)} opponents needs an environment of "
                f"its own; got {met} that play against any. Raise num_envs or share."
            )
        with make_opposed(dataclasses.replace(cfg, type="for_loop", num_envs=1, wait_num=0), 0):
            pass


def make_opposed(cfg: EnvConfig, seed: int) -> SyncEnvWithOpponents | AsyncEnvWithOpponents:
    """Makes one actor's pool of games in which opponents play too.

    Raises:
      ValueError: as `check`, but for the shares.
    """
    seating, runs = _seating(cfg), cfg.opponents.runs
    inner = dataclasses.replace(
        cfg,
        num_envs=len(seating.players),
        wait_num=1 if cfg.wait_num else 0,
        num_workers=_workers(cfg, len(seating.players) // _agents(cfg)),
        opponents=OpponentsConfig(),
    )
    pool = make_pool(inner, seed)
    try:
        opponents = [
            _Frozen(run, pool.spec, cfg.opponents, int((seating.players == i).sum()), seed, i)
            for i, run in enumerate(runs)
        ]
        names = _names(runs)
    except BaseException:
        pool.close()
        raise
    if isinstance(pool, AsyncEnv):
        return AsyncEnvWithOpponents(pool, seating, opponents, names, cfg.wait_num)
    return SyncEnvWithOpponents(pool, seating, opponents, names)


class _Frozen:
    """A run's agent as it was at a checkpoint; a `rlstack.envs.opponents.Opponent`."""

    def __init__(
        self, run: str, spec: EnvSpec, cfg: OpponentsConfig, num_seats: int, seed: int, number: int
    ) -> None:
        path = _checkpoint(run, "opponents")
        experiment = read_config(RunDir.open(path.parent.parent))
        try:
            self._params = read_params(path, experiment, spec, on_host=True)
            self._agent = make_agent(experiment, spec, greedy=cfg.greedy)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"env.opponents: {run} must be of an agent that fits these environments; {error}"
            ) from error
        self._num_seats, self._seed, self._number = num_seats, seed, number
        self._inferencer: Inferencer | None = None  # made when needed: it takes a device

    def __call__(self, seats: np.ndarray | None, timestep: TimeStep) -> PyTree:
        if self._inferencer is None:
            params = FixedParams(jax.tree.map(jnp.asarray, self._params))
            key = role_key(self._seed, "opponent", self._number)
            self._inferencer = Inferencer(
                InferencerConfig(), self._agent, params, self._num_seats, key
            )
        return self._inferencer.inference(seats, timestep).agent_output.action


def _checkpoint(run: str | os.PathLike[str], field: str) -> Path:
    """Returns the path of a checkpoint, or of the newest one of a run."""
    path = Path(run).absolute()
    try:
        if path.parent.name == "checkpoints" and path.is_dir():
            checkpoint.read_metadata(path)
            return path
        directory = RunDir.open(path)
        return newest_checkpoint(directory, read_config(directory))
    except ValueError as error:
        raise ValueError(
            f"env.{field}: {run} must be a run or a checkpoint of one; {error}"
        ) from error


def _names(runs: tuple[str, ...]) -> list[str]:
    """Returns NAME@FRAMES for each, or whole paths where these do not tell them apart."""
    paths = [_checkpoint(run, "opponents") for run in runs]
    told = [checkpoint.read_metadata(path) for path in paths]
    frames = [metadata.get("env_frames", metadata["step"]) for metadata in told]
    names = [f"{path.parent.parent.name}@{n}" for path, n in zip(paths, frames, strict=True)]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _seating(cfg: EnvConfig) -> Seating:
    return assign_seats(cfg.num_envs, _agents(cfg), len(cfg.opponents.runs), cfg.opponents.share)


def _agents(cfg: EnvConfig) -> int:
    """Returns how many play one game."""
    agents: Any = cfg.options.get("agents", 1)
    if not isinstance(agents, int) or agents < 2:
        raise ValueError(
            f"env.opponents: {cfg.name} must be a game of several agents, whose environments "
            f"follow one another; got the option agents = {agents!r}. Give --env.options agents N."
        )
    return agents


def _workers(cfg: EnvConfig, games: int) -> int:
    """Returns the number of a pool's workers: a game must not be split between processes."""
    if cfg.type != "process":
        return cfg.num_workers
    most = min(cfg.num_workers or os.cpu_count() or 1, games)
    return next(number for number in range(most, 0, -1) if games % number == 0)
