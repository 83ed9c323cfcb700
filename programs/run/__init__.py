"""Operations on a run: train, plan, evaluate, record, compare.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.devices, rlstack.envs,
rlstack.families, rlstack.fused, rlstack.jax_envs, rlstack.learning, rlstack.networks,
rlstack.programs, rlstack.programs.components, rlstack.programs.launchers, rlstack.programs.nodes,
rlstack.programs.policies, rlstack.programs.policy_sets, rlstack.programs.profiling,
rlstack.programs.topologies, rlstack.programs.tracking, rlstack.random, rlstack.rpc, rlstack.specs,
rlstack.storage.
"""
