"""Ready experiments, named ENV-AGENT. Constants come from the sources named, or were tuned here.

May import: agents, programs, rlstack, rlstack.acting, rlstack.families, rlstack.networks,
rlstack.replay.
"""

from programs.presets import (
    a2c,
    bc,
    c51,
    dqn,
    entity,
    fixed,
    impala,
    munchausen,
    off_policy,
    ppo,
    quantile,
    r2d2,
    rainbow,
    reinforce,
)
from programs.presets.registry import PRESETS, describe
from programs.presets.registry import find as preset

__all__ = [
    "PRESETS",
    "a2c",
    "bc",
    "c51",
    "describe",
    "dqn",
    "entity",
    "fixed",
    "impala",
    "munchausen",
    "off_policy",
    "ppo",
    "preset",
    "quantile",
    "r2d2",
    "rainbow",
    "reinforce",
]
