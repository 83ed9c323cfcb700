"""Calls to other nodes, with trees of arrays as arguments and results.

A class marks its remote methods with `remote`, `serve` answers calls for an object of the class,
and a `RemoteObject` makes the calls.

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
