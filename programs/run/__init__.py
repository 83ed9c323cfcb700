"""Operations on a run: train, plan, evaluate, record, report, compare.

May import: agents, programs, programs.components, programs.launchers, programs.nodes,
programs.topologies, programs.tracking, rlstack, rlstack.acting, rlstack.exploration,
rlstack.fused, rlstack.jax_envs, rlstack.learning, rlstack.math, rlstack.networks, rlstack.rpc,
rlstack.storage.
"""
