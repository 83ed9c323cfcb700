"""Calls to other nodes, over Courier, with trees of arrays as arguments and results.

A class marks with `remote` what may be called from afar, `serve` answers for an object of it, and a
`RemoteObject` calls it.

May import: rlstack.
"""

from rlstack.rpc.calls import RemoteObject, serve
from rlstack.rpc.codec import register
from rlstack.rpc.node import Node, Stop, StoppedError, client_of
from rlstack.rpc.service import (
    ClosedError,
    Remote,
    RemoteError,
    Service,
    UnavailableError,
    remote,
)

__all__ = [
    "ClosedError",
    "Node",
    "Remote",
    "RemoteError",
    "RemoteObject",
    "Service",
    "Stop",
    "StoppedError",
    "UnavailableError",
    "client_of",
    "register",
    "remote",
    "serve",
]
