"""Algorithms, one file each.

To add one, write ``agents/NAME.py`` and decorate its agent with `register`. `AGENTS` finds the
modules of this package, so there is no list to edit; it imports what is asked for.

Pure.

May import: rlstack, rlstack.configs, rlstack.distributions, rlstack.exploration, rlstack.families,
rlstack.math, rlstack.networks, rlstack.specs.
"""

from __future__ import annotations

if __name__ != "rlstack.agents":  # from a checkout, where the folder is beside rlstack/
    raise ImportError("This package is rlstack.agents: import it by that name.")

from rlstack.agents.registry import AGENTS, Entry, register

__all__ = ["AGENTS", "Entry", "register"]
