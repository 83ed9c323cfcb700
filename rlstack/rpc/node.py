"""Support for rlstack's classes as nodes of a user's own Launchpad program.

``lp.CourierNode(Learner, cfg, agent, replay_buffer, rng_key)`` constructs a Learner in the node's
process and calls its ``set_courier_server`` and ``run``; other nodes get a ``courier.Client``.
Courier's own handlers hang on array arguments. So a `Node` replaces them with the handlers of a
`Service`, and `client_of` makes a `RemoteObject` from a ``courier.Client``. What sends and answers
calls is imported then, because most objects are only used in their own process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rlstack.rpc.interface import Interface, is_client


class Event(Protocol):
    """The part of the interface of ``threading.Event`` that is needed."""

    def is_set(self) -> bool:
        """Whether it has been set."""


Stop = Callable[[], bool] | Event | None  # says when to stop; None: when the program stops


class StoppedError(RuntimeError):
    """A node was told to stop while it waited."""


class Node:
    """Base of the classes that a ``launchpad.CourierNode`` can run."""

    _server: Any = None  # a courier.Server
    _program_stop: Event | None = None

    def set_courier_server(self, server: Any) -> None:
        """Serves the object that `_served` returns; Launchpad calls this method in the node."""
        from rlstack.rpc import courier
        from rlstack.rpc.service import Service

        self._program_stop = courier.program_stop_event()
        served = self._served()
        if served is not None:
            courier.replace_handlers(server, self, Service(served))
            server.Start()
            self._server = server

    def _served(self) -> object | None:
        """Returns the object with the remote methods for other nodes; None if there are none."""
        return self

    @contextlib.contextmanager
    def _running(self, stop: Stop) -> Iterator[Callable[[], bool]]:
        """Yields a function that returns whether to stop; then closes Launchpad's server."""
        stop = self._program_stop if stop is None else stop
        try:
            yield _never if stop is None else stop if callable(stop) else stop.is_set
        finally:
            if self._server is not None:
                self._server.Stop()
                self._server.Join()
                self._server = None


def client_of(node: Any, interface: Interface, *, name: str, timeout: float = 60.0) -> Any:
    """Returns a `RemoteObject` if `node` is a ``courier.Client``, else `node` itself.

    Args:
      node: an object of this process, or the client that Launchpad makes for an object in another
          node.
      interface: the class with the marked methods that the node serves, or rules by name.
      name: the node's name, for errors.
      timeout: seconds that a call may take, including the wait until the node has started.
    """
    if not is_client(node):
        return node
    from rlstack.rpc.calls import RemoteObject

    return RemoteObject(node, interface, name=name, timeout=timeout)


def _never() -> bool:
    return False
