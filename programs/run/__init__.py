"""Operations on a run: train, resume, evaluate, record, play, report.

May import: agents, programs, programs.components, programs.launchers, programs.nodes,
programs.tracking, rlstack, rlstack.acting, rlstack.distributions, rlstack.entity, rlstack.envs,
rlstack.exploration, rlstack.fused, rlstack.jax_envs, rlstack.learning, rlstack.math,
rlstack.networks, rlstack.rpc, rlstack.storage.
"""
