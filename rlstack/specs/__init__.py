"""The meaning of environment specs: bounds of real numbers, and masks of actions.

Pure.

May import: rlstack.
"""
