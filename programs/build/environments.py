"""Makes pools of environments from their config, with frozen opponents if it names any."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.env_config import EnvConfig, OpponentsConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.types import EnvSpec

if TYPE_CHECKING:  # imported where an experiment has opponents
    from rlstack.envs.opponents import AsyncEnvWithOpponents, SyncEnvWithOpponents

Pool: TypeAlias = "SyncEnv | AsyncEnv | SyncEnvWithOpponents | AsyncEnvWithOpponents"


def make_env(
    cfg: EnvConfig, seed: int, *, step_info: bool = False, first_index: int | None = None
) -> Pool:
    """Makes one actor's pool of environments.

    Args:
      cfg: the environments.
      seed: environment i is seeded with ``seed + i``.
      step_info: True to keep the info of every step.
      first_index: the number of the first episode of the first environment, for environments that
        have ``reset_with_index``.

    Raises:
      ValueError: there are no such environments, or opponents do not fit them.
    """
    if not cfg.opponents.runs:
        return _make_pool(cfg, seed, step_info, first_index)
    from rlstack.programs.build import opponents

    pool = _make_pool(opponents.config_of_games(cfg), seed, step_info, first_index)
    try:
        return opponents.add_opponents(pool, cfg, seed)
    except BaseException:
        pool.close()
        raise


def fault_error(name: str, bad: np.ndarray) -> EnvError:
    """Returns an error that names the environments with faulty steps in a compiled program.

    Args:
      name: the environments' name.
      bad: uint8 ``[B]``, the kinds of faults per environment; see `rlstack.fused.acting.faults`.
    """
    from rlstack.fused.acting import NOT_FINITE

    not_finite = (bad & NOT_FINITE).astype(bool)
    ids = ", ".join(map(str, np.flatnonzero(not_finite if not_finite.any() else bad)))
    if not_finite.any():
        return EnvError(
            f"Env {ids} ({name}): rewards and observations must be finite; they were not. Mend "
            "the environment, or turn the check off with --env.check-finite False."
        )
    return EnvError(
        f"Env {ids} ({name}): integers in observations must lie in their spaces; they did not. "
        "Mend the environment, or declare the space that it has. In a pool (another topology than "
        "fused) the error names the value."
    )


def starting_seconds(pool: Pool, began: float) -> float:
    """Returns the seconds since processes of a pool began to start; 0 if it has none."""
    return time.monotonic() - began if "restarts" in pool.stats() else 0.0


def make_evaluation_env(experiment: Experiment, role: str = "evaluator", first: int = 0) -> Pool:
    """Makes the environments of one evaluation; they start the same each time.

    Args:
      experiment: the experiment; `Experiment.evaluation_env` is used.
      role: the role whose seed is used; another role gives other initial states.
      first: the number of the first environment, added to its seed. In an evaluation by index it is
        also the number of its first episode.
    """
    cfg, seed = experiment.evaluation_env, role_seed(experiment.seed, role) + first
    return make_env(cfg, seed, first_index=first if experiment.evaluator.by_index else None)


def environment_spec(experiment: Experiment) -> EnvSpec:
    """Makes one environment of an experiment, and returns its spec.

    Raises:
      ValueError: there is no such environment.
    """
    one = dataclasses.replace(experiment.env, num_envs=1, wait_num=0, opponents=OpponentsConfig())
    with make_env(one, seed=0) as env:
        return env.spec


def check_opponents(experiment: Experiment) -> None:
    """Checks that the opponents can play these games, before anything is started.

    Raises:
      ValueError: a checkpoint is missing or its agent does not fit, the games have no places for
        opponents, or the environments cannot be divided as the config says.
    """
    for field, cfg in (
        ("opponents", experiment.env),
        ("eval_opponents", experiment.evaluation_env),
    ):
        if cfg.opponents.runs:
            from rlstack.programs.build import opponents

            opponents.check_shares(cfg, f"env.{field}")
            small = dataclasses.replace(cfg, type="for_loop", num_envs=1, wait_num=0)
            with make_env(small, seed=0):
                pass


def _make_pool(
    cfg: EnvConfig, seed: int, step_info: bool, first_index: int | None
) -> SyncEnv | AsyncEnv:
    more: dict[str, Any] = {
        "seed": seed,
        "options": dict(cfg.options),
        "num_workers": cfg.num_workers or None,
        "max_restarts": cfg.max_restarts,
        "restart_window": cfg.restart_window,
        "step_timeout": cfg.step_timeout,
        "start_timeout": cfg.start_timeout,
        "check_finite": cfg.check_finite,
        "step_info": step_info,
        "first_index": first_index,
        "levels": cfg.levels,
    }
    if cfg.wait_num:
        return AsyncEnv(cfg.name, cfg.num_envs, cfg.wait_num, cfg.type, **more)
    return SyncEnv(cfg.name, cfg.num_envs, cfg.type, **more)
