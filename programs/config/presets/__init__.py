"""Ready experiments, named ENV-AGENT.

Their constants come from the sources that they name, or were tuned here. To add one, write a
function in a module of this package and decorate it with `registry.preset`. `PRESETS` finds the
modules, so there is no list to edit.
"""

from rlstack.programs.config.presets.registry import PRESETS, describe
from rlstack.programs.config.presets.registry import find as preset

__all__ = ["PRESETS", "describe", "preset"]
