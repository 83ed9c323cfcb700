"""Calls to other nodes, with trees of arrays as arguments and results.

A class marks its remote methods with `remote`, `serve` answers calls for an object of the class,
and a `RemoteObject` makes the calls. What sends and answers calls is imported when it is first
used.

May import: rlstack, rlstack.imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstack.imports.deferred import on_first_use
from rlstack.rpc.interface import Remote, is_client, remote
from rlstack.rpc.node import Node, Stop, StoppedError, client_of

if TYPE_CHECKING:
    from rlstack.rpc.calls import RemoteObject, serve
    from rlstack.rpc.codec import register
    from rlstack.rpc.service import ClosedError, RemoteError, Service, UnavailableError

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
    "is_client",
    "register",
    "remote",
    "serve",
]

__getattr__ = on_first_use(
    __name__,
    {
        "RemoteObject": "calls",
        "serve": "calls",
        "register": "codec",
        "ClosedError": "service",
        "RemoteError": "service",
        "Service": "service",
        "UnavailableError": "service",
    },
)
