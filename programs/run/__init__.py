"""Operations on a run: train, plan, evaluate, record, compare.

May import: agents, programs, programs.components, programs.launchers, programs.nodes,
programs.policies, programs.policy_sets, programs.profiling, programs.topologies,
programs.tracking, rlstack, rlstack.acting, rlstack.devices, rlstack.envs, rlstack.exploration,
rlstack.fused, rlstack.jax_envs, rlstack.learning, rlstack.networks, rlstack.random, rlstack.rpc,
rlstack.storage.
"""
