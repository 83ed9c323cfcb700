"""What the nodes of a program do, one file each.

`rlstack.programs.launchers` runs them; `rlstack.programs.launchers.launchpad` makes Launchpad nodes
of them.

May import: rlstack, rlstack.acting, rlstack.devices, rlstack.envs, rlstack.exploration,
rlstack.learning, rlstack.programs, rlstack.programs.components, rlstack.programs.policies,
rlstack.programs.policy_sets, rlstack.programs.profiling, rlstack.programs.tracking, rlstack.replay,
rlstack.rpc, rlstack.specs, rlstack.storage.
"""
