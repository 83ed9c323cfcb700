"""Operations on a run: train, resume, evaluate, record, load, play, report.

May import: agents, programs, programs.components, programs.launchers, programs.nodes,
programs.topologies, programs.tracking, rlstack, rlstack.acting, rlstack.distributions,
rlstack.entity, rlstack.envs, rlstack.exploration, rlstack.families, rlstack.fused,
rlstack.jax_envs, rlstack.learning, rlstack.math, rlstack.networks, rlstack.rpc, rlstack.storage.
"""
