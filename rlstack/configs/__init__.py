"""The options of the parts of rlstack: dataclasses with checks, one file for each part.

What implements an option imports its config from here. This package imports no implementation and
no JAX, so that programs can read, compare and write configs at once.

Pure.

May import: rlstack.
"""
