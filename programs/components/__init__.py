"""Makes the parts of an experiment from its config, or from a finished run.

May import: agents, programs, programs.tracking, rlstack, rlstack.acting, rlstack.devices,
rlstack.envs, rlstack.exploration, rlstack.families, rlstack.fused, rlstack.jax_envs,
rlstack.random, rlstack.replay, rlstack.storage.
"""
