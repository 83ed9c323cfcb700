"""Several policies in one run: who plays which rows, their parts, and the loop that drives them.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.envs, rlstack.exploration,
rlstack.families, rlstack.jax_envs, rlstack.learning, rlstack.math, rlstack.programs,
rlstack.programs.components, rlstack.programs.tracking, rlstack.replay, rlstack.storage.
"""
