"""What every run has: its directory, its schedule, its display, and dumps of failed updates.

May import: programs, rlstack.acting, rlstack.learning, rlstack.storage.
"""
