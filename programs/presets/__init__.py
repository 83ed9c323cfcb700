"""Ready experiments, named ENV-AGENT.

Their constants come from the sources that they name, or were tuned here. To add one, write a
function in a module of this package and decorate it with `registry.preset`: every module of this
package is imported here, so there is no list to edit.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.families, rlstack.networks,
rlstack.programs, rlstack.replay.
"""

from rlstack.programs import own_modules
from rlstack.programs.presets.registry import PRESETS, describe
from rlstack.programs.presets.registry import find as preset
from rlstack.references import import_modules

import_modules(__name__, __path__)
own_modules.load_entry_points(own_modules.PRESETS)

__all__ = ["PRESETS", "describe", "preset"]
