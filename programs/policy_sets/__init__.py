"""Several policies in one run: who plays which rows, their parts, and the loop that drives them.

May import: agents, programs, programs.components, programs.tracking, rlstack, rlstack.acting,
rlstack.envs, rlstack.exploration, rlstack.families, rlstack.jax_envs, rlstack.learning,
rlstack.math, rlstack.replay, rlstack.storage.
"""
