"""Ready experiments, named ENV-AGENT. Constants come from the sources named, or were tuned here."""

from programs.presets import dqn, ppo, r2d2
from programs.presets.registry import PRESETS, describe
from programs.presets.registry import find as preset

__all__ = ["PRESETS", "describe", "dqn", "ppo", "preset", "r2d2"]
