"""What a class needs to be called by other nodes, or to be a node of a user's Launchpad program.

This module imports nothing that sends or answers calls, because most objects are only used in their
own process.

``lp.CourierNode(Learner, cfg, agent, replay_buffer, rng_key)`` constructs a Learner in the node's
process and calls its ``set_courier_server`` and ``run``; other nodes get a ``courier.Client``.
Courier's own handlers hang on array arguments. So a `Node` replaces them with the handlers of a
`Service`, and `client_of` makes a `RemoteObject` from a ``courier.Client``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

REMOTE_MARK = "_remote_method"  # the attribute of a method that `remote` has marked
Function = TypeVar("Function", bound=Callable[..., Any])


class Remote(NamedTuple):
    """The rules of a remote method."""

    idempotent: bool = False  # running it twice has the effect of running it once
    prompt: bool = False  # it does not block, so that other calls can wait until it returns


Interface = Mapping[str, Remote] | type


def remote(*, idempotent: bool = False, prompt: bool = False) -> Callable[[Function], Function]:
    """Marks a method as one that other nodes may call.

    Args:
      idempotent: whether running the method twice has the effect of running it once. Then its
          answers are not kept.
      prompt: whether the method does not block, for example because it returns a future. Then
          requests that come together may be served by one thread, one after the other, which is
          cheaper than waking a thread for each.
    """

    def mark(function: Function) -> Function:
        setattr(function, REMOTE_MARK, Remote(idempotent, prompt))
        return function

    return mark


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


def is_client(x: object) -> bool:
    """Whether `x` is a ``courier.Client``; imports nothing."""
    courier = sys.modules.get("courier")
    return courier is not None and isinstance(x, courier.Client)


def _never() -> bool:
    return False
