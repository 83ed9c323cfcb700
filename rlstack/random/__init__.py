"""Random numbers drawn on the host, equal to those of JAX, and functions compiled without draws.

Pure.

May import: rlstack.
"""
