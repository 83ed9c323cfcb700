"""Tools for importing other packages.

May import: nothing.
"""
