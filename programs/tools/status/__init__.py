"""How runs are doing, read from their files and processes alone: ``rlstack top`` and ``dashboard``.

It asks no node anything, so that a running program does not notice it. It does not import JAX.
"""
