"""Servers for other programs of this machine: the policy of a run over HTTP, and to games.

Importing this package or `local_http` does not import JAX.

May import: rlstack, rlstack.entity, rlstack.envs, rlstack.programs.components,
rlstack.programs.policies, rlstack.programs.tracking.
"""
