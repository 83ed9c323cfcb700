"""Makes pools of environments from their config, with frozen opponents if it names any."""

from __future__ import annotations

import dataclasses
from typing import Any

from programs.components import opponents
from programs.components.seeds import role_seed
from programs.experiment import EnvConfig, Experiment
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.opponents import AsyncEnvWithOpponents, SyncEnvWithOpponents

Pool = SyncEnv | AsyncEnv | SyncEnvWithOpponents | AsyncEnvWithOpponents


def make_env(cfg: EnvConfig, seed: int, *, step_info: bool = False) -> Pool:
    """Makes one actor's pool of environments; ``step_info`` keeps the info of every step.

    Raises:
      ValueError: there are no such environments, or opponents do not fit them.
    """
    if not cfg.opponents.runs:
        return _make_pool(cfg, seed, step_info)
    pool = _make_pool(opponents.config_of_games(cfg), seed, step_info)
    try:
        return opponents.add_opponents(pool, cfg, seed)
    except BaseException:
        pool.close()
        raise


def make_evaluation_env(experiment: Experiment, role: str = "evaluator", first: int = 0) -> Pool:
    """Makes the environments of one evaluation; they start the same each time.

    Args:
      experiment: the experiment; `Experiment.evaluation_env` is used.
      role: the role whose seed is used; another role gives other initial states.
      first: the number of the first environment, added to its seed.
    """
    return make_env(experiment.evaluation_env, role_seed(experiment.seed, role) + first)


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
            opponents.check_shares(cfg, f"env.{field}")
            small = dataclasses.replace(cfg, type="for_loop", num_envs=1, wait_num=0)
            with make_env(small, seed=0):
                pass


def _make_pool(cfg: EnvConfig, seed: int, step_info: bool) -> SyncEnv | AsyncEnv:
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
    }
    if cfg.wait_num:
        return AsyncEnv(cfg.name, cfg.num_envs, cfg.wait_num, cfg.type, **more)
    return SyncEnv(cfg.name, cfg.num_envs, cfg.type, **more)
