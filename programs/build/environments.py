"""From the config of environments to pools of them."""

from __future__ import annotations

from typing import Any

from programs.build.opponents import make_opposed
from programs.build.pools import make_pool
from programs.build.seeds import role_seed
from programs.experiment import EnvConfig, Experiment


def make_env(cfg: EnvConfig, seed: int) -> Any:
    """Makes one actor's pool of environments, in which others may play too."""
    return make_opposed(cfg, seed) if cfg.opponents.runs else make_pool(cfg, seed)


def make_evaluation_env(experiment: Experiment, role: str = "evaluator") -> Any:
    """Makes the environments of one evaluation; they start alike each time.

    Args:
      experiment: whose environments, as its evaluation has them.
      role: by which they are seeded: others start elsewhere.
    """
    return make_env(experiment.evaluation_env, role_seed(experiment.seed, role))
