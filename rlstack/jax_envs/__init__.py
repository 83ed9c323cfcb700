"""Environments written in JAX: their protocol, batches of them, adapters, and a pool.

A batch of such environments is a pure function of arrays, so it runs inside a jitted loop
(`rlstack.fused`). The pool makes the same environments available wherever other pools are.

May import: rlstack, rlstack.envs, rlstack.imports, rlstack.random, rlstack.specs.
"""
