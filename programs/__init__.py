"""Experiments and the topologies that run them.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.exploration, rlstack.families,
rlstack.learning, rlstack.networks, rlstack.replay.
"""

if __name__ != "rlstack.programs":  # from a checkout, where the folder is beside rlstack/
    raise ImportError("This package is rlstack.programs: import it by that name.")
