"""The policies of finished runs: in any loop, as players of games, on the screen, in videos.

May import: agents, programs, programs.components, programs.policy_sets, programs.tracking, rlstack,
rlstack.acting, rlstack.distributions, rlstack.entity, rlstack.envs, rlstack.exploration,
rlstack.families, rlstack.math, rlstack.networks, rlstack.specs, rlstack.storage.
"""
