"""From the config of environments to a pool of them, without anybody else who plays."""

from __future__ import annotations

from programs.experiment import EnvConfig
from rlstack.envs import AsyncEnv, SyncEnv


def make_pool(cfg: EnvConfig, seed: int) -> SyncEnv | AsyncEnv:
    """Makes one actor's pool of environments."""
    workers = cfg.num_workers or None
    options = dict(cfg.options)
    if cfg.wait_num:
        return AsyncEnv(
            cfg.name,
            cfg.num_envs,
            cfg.wait_num,
            cfg.type,
            seed=seed,
            options=options,
            num_workers=workers,
        )
    return SyncEnv(
        cfg.name, cfg.num_envs, cfg.type, seed=seed, options=options, num_workers=workers
    )
