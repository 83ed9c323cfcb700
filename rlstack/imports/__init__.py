"""How other packages are imported.

May import: nothing.
"""
