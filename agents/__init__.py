"""Algorithms, one file each.

To add one, write ``agents/NAME.py`` and decorate its agent with `register`: every module of this
package is imported here, so there is no list to edit.

Pure.

May import: rlstack, rlstack.distributions, rlstack.exploration, rlstack.families, rlstack.math,
rlstack.networks.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

from agents.registry import AGENTS, Entry, register
from rlstack.references import import_modules

import_modules(__name__, __path__)

# The config of any agent of this package. The command line takes its options from this union. Its
# members are known only at run time.
if TYPE_CHECKING:
    AgentConfig = object
else:
    AgentConfig = functools.reduce(operator.or_, AGENTS)

__all__ = ["AGENTS", "AgentConfig", "Entry", "register"]
