"""Learning: the learner, which samples batches, makes updates and publishes params.

May import: rlstack, rlstack.configs, rlstack.devices, rlstack.fused, rlstack.networks,
rlstack.random, rlstack.replay, rlstack.rpc.
"""
