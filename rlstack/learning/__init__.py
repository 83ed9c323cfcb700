"""Learning: the learner, which samples batches, makes updates and publishes params.

May import: rlstack, rlstack.networks, rlstack.replay, rlstack.rpc.
"""
