"""How runs are doing, read from their files and processes alone: ``rlstack top`` and ``dashboard``.

No node is asked, so a running program is not disturbed. The package does not import JAX.
"""
