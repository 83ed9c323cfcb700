"""Acting: the actor, local and served inference, the way of params to it, and the evaluator.

May import: rlstack, rlstack.exploration, rlstack.networks.
"""
