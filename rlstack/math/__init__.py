"""Functions of arrays: returns, n-step transitions, value distributions, statistics, permutations.

Pure.

May import: rlstack.
"""
