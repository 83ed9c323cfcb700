"""Environments of other libraries that are written in JAX, and pictures of them.

A module imports its library when an environment is made.
"""
