"""Experiments and the topologies that run them.

May import: agents, rlstack, rlstack.acting, rlstack.exploration, rlstack.families,
rlstack.learning, rlstack.networks, rlstack.replay.
"""
