"""Functions of arrays: returns, n-step transitions, value distributions, statistics, shuffles.

Pure.

May import: rlstack.
"""
