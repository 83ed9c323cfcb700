"""The policies of finished runs: in any loop, as players of games, on the screen, in videos.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.distributions, rlstack.entity,
rlstack.envs, rlstack.exploration, rlstack.families, rlstack.math, rlstack.networks,
rlstack.programs, rlstack.programs.components, rlstack.programs.policy_sets,
rlstack.programs.tracking, rlstack.specs, rlstack.storage.
"""
