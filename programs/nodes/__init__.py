"""What the nodes of a program do, one file each.

`programs.launchers` runs them; `programs.launchers.launchpad` makes Launchpad nodes of them.

May import: programs, programs.components, programs.policies, programs.policy_sets,
programs.profiling, programs.tracking, rlstack, rlstack.acting, rlstack.devices, rlstack.envs,
rlstack.exploration, rlstack.learning, rlstack.replay, rlstack.rpc, rlstack.specs, rlstack.storage.
"""
