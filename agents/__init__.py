"""Algorithms, one file each.

To add one, write ``agents/NAME.py`` and decorate its agent with `register`: every module of this
package is imported here, so there is no list to edit.

Pure.

May import: rlstack, rlstack.distributions, rlstack.exploration, rlstack.families, rlstack.math,
rlstack.networks, rlstack.specs.
"""

from __future__ import annotations

if __name__ != "rlstack.agents":  # from a checkout, where the folder is beside rlstack/
    raise ImportError("This package is rlstack.agents: import it by that name.")

from rlstack.agents.registry import AGENTS, Entry, register
from rlstack.references import import_modules

import_modules(__name__, __path__)

__all__ = ["AGENTS", "Entry", "register"]
