"""Servers for other programs of this machine: the policy of a run over HTTP, and to games.

Importing this package or `local_http` does not import JAX.
"""
