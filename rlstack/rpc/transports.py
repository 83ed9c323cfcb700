"""The transports of calls, and the choice of a process's transport.

- ``direct``: nodes in one process; no socket, no message, no copy of arrays.
- ``zmq``: ZeroMQ, encrypted; only nodes that hold the program's keys are admitted.
- ``courier``: Launchpad's Courier, on CPython 3.10; neither encrypted nor authenticated.

An address names its transport ("zmq://host:port"). An address without a name ("host:port") belongs
to the transport of this process: the one that `chosen` has set here or in the process that started
this one; else Courier where it is installed, and ZeroMQ elsewhere.

The module of a transport, and its package, are imported when the transport is first used.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from rlstack.rpc.addresses import ALL_ADDRESSES
from rlstack.rpc.service import Service

_VARIABLE = "RLSTACK_TRANSPORT"  # environment variable with the name of the transport
_VARIABLES = (_VARIABLE, "RLSTACK_KEYS")  # and the file of a program's keys
_MARK = "://"


class _Modules(NamedTuple):
    server: str  # has a class `Server`
    channel: str  # has a class `Channel`
    package: str = ""  # that must be installed


_MODULES = {
    "direct": _Modules("rlstack.rpc.direct", "rlstack.rpc.direct"),
    "zmq": _Modules("rlstack.rpc.zmq.server", "rlstack.rpc.zmq.channel", "zmq"),
    "courier": _Modules("rlstack.rpc.courier", "rlstack.rpc.courier", "courier"),
}
TRANSPORTS = tuple(_MODULES)


class Server(Protocol):
    """Answers the calls of a service until `close`.

    Attributes:
      address: the address at which clients reach the server.
    """

    address: str

    def close(self) -> None:
        """Refuses new calls, and returns when all calls in progress have been answered."""

    def __enter__(self) -> Server: ...

    def __exit__(self, *_: object) -> None: ...


class Channel(Protocol):
    """The connection of one client to one address.

    Attributes:
      in_process: whether the transport passes records of calls instead of messages.
    """

    in_process: bool

    def call(self, method: str, data: Any, timeout: float) -> tuple[str, Any]:
        """Calls once, without waiting for a node that does not listen.

        Args:
          method: name of the method.
          data: the message of the request, or its record where `in_process`.
          timeout: seconds until the call is abandoned.

        Returns:
          ``("OK", answer)``, or a status and its message: UNAVAILABLE when there is no connection
          or it broke, DEADLINE_EXCEEDED, CANCELLED after `cancel`, NOT_FOUND for an unknown method.
        """

    def cancel(self) -> None:
        """Cancels all calls in progress and all later ones."""


def is_installed(transport: str) -> bool:
    """Whether the package of a transport is installed; imports nothing."""
    package = _MODULES[transport].package
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec, as some tests have
        return sys.modules.get(package) is not None


def default() -> str:
    """Returns the transport between processes that this installation uses by default.

    Courier where it is installed, because it is the faster one for small messages.
    """
    return "courier" if is_installed("courier") else "zmq"


def current() -> str:
    """Returns the transport of this process."""
    return os.environ.get(_VARIABLE) or default()


def variables() -> dict[str, str]:
    """Returns the environment variables by which another process uses this one's transport.

    Processes inherit them; those that another program starts must be given them.
    """
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def secret() -> bytes:
    """Returns what `chosen` needs on another host to join this process's program."""
    keys: Any = _load("rlstack.rpc.zmq.keys", "zmq") if current() == "zmq" else None
    return keys.current().text() if keys else b""


def adopt(secret: bytes) -> None:
    """Uses the `secret` of a program on another host, whose file of keys this host lacks."""
    if secret:
        keys: Any = _load("rlstack.rpc.zmq.keys", "zmq")
        keys.adopt(secret)


@contextlib.contextmanager
def chosen(transport: str, where: str = "", secret: bytes = b"") -> Iterator[None]:
    """Sets the transport of this process, and of the processes that it starts in the body.

    For ``zmq`` it also makes keys, which exist until the end of the body. The body is the life of a
    program; a process runs one program at a time.

    Args:
      transport: one of `TRANSPORTS`.
      where: the directory for the file of keys; by default the directory of temporary files.
      secret: that of a program which runs on another host; by default this is a new program.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"rpc: a transport must be one of {TRANSPORTS}; got {transport!r}.")
    before = os.environ.get(_VARIABLE)
    with contextlib.ExitStack() as stack:
        if transport == "zmq":
            keys: Any = _load("rlstack.rpc.zmq.keys", "zmq")
            stack.enter_context(keys.made(where, secret))
        os.environ[_VARIABLE] = transport
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE)
            if before is not None:
                os.environ[_VARIABLE] = before


def start_server(
    service: Service,
    port: int | None = None,
    bind_address: str = ALL_ADDRESSES,
    transport: str = "",
) -> Server:
    """Starts a server.

    Args:
      service: the service that answers the calls.
      port: the port to listen on; a free one by default.
      bind_address: the address of this host to listen on, in addition to loopback; default: all.
      transport: one of `TRANSPORTS`; this process's transport by default.

    Raises:
      ModuleNotFoundError: the transport's package is not installed.
      OSError: the port is taken, or this host has no such address.
    """
    name = transport or current()
    return _module("server", name).Server(service, port, bind_address)


def open_channel(address: str) -> Channel:
    """Returns a channel to an address; it connects at the first call.

    Raises:
      ModuleNotFoundError: the transport's package is not installed.
    """
    name, mark, place = address.rpartition(_MARK)
    return _module("channel", name if mark else current()).Channel(place)


def _module(part: str, transport: str) -> Any:
    if transport not in TRANSPORTS:
        raise ValueError(f"rpc: a transport must be one of {TRANSPORTS}; got {transport!r}.")
    return _load(getattr(_MODULES[transport], part), transport)


def _load(module: str, transport: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if transport != "zmq" or error.name != "zmq":
            raise
        raise ModuleNotFoundError(
            "rpc: the transport zmq needs pyzmq, which is not installed (`pip install pyzmq`). "
            "Use the single_process topology without it."
        ) from error
