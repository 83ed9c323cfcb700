"""Calls over ZeroMQ, encrypted and authenticated by CURVE; see `rlstack.rpc.transports`."""
