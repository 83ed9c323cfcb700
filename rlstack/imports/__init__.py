"""Tools for importing other packages, and for reading sources.

May import: nothing.
"""
