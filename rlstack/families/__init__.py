"""The common parts of each family of agents: policy gradient, Q-learning, off-policy actor-critic.

Pure.

May import: rlstack, rlstack.configs, rlstack.distributions, rlstack.exploration, rlstack.math,
rlstack.networks, rlstack.specs.
"""
