"""Acting: the actor, inference in its process or in a service, and the evaluator.

May import: rlstack, rlstack.configs, rlstack.devices, rlstack.exploration, rlstack.networks,
rlstack.replay, rlstack.rpc.
"""
