"""What the specs of environments mean: bounds of real numbers, and masks of actions.

Pure.

May import: rlstack.
"""
