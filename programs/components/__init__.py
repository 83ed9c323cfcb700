"""Makes the parts of an experiment from its config, or from a finished run.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.devices, rlstack.envs,
rlstack.exploration, rlstack.families, rlstack.fused, rlstack.jax_envs, rlstack.programs,
rlstack.programs.tracking, rlstack.random, rlstack.replay, rlstack.storage.
"""
