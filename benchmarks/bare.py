"""Calls with a transport's own library and nothing else: what `rlstack.rpc` is compared with.

A server answers each message with what a handler makes of it. `zmq` is a loop of one thread over
encrypted sockets, with the keys of the program (`rlstack.rpc.transports.chosen`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Handler = Callable[[bytes], bytes]


class Client(Protocol):
    """Calls a server; it may have several calls in progress. For one thread."""

    def send(self, message: bytes) -> None:
        """Begins a call."""

    def receive(self) -> bytes:
        """Returns the answer to the oldest call without one."""


def serve(transport: str, handler: Handler) -> contextlib.AbstractContextManager[str]:
    """Serves while the context lasts; gives the address."""
    return _SERVERS[transport](handler)


def connect(transport: str, address: str) -> contextlib.AbstractContextManager[Client]:
    """Returns a client for the life of the context."""
    return _CLIENTS[transport](address)


@contextlib.contextmanager
def _serve_zmq(handler: Handler) -> Iterator[str]:
    import zmq

    from rlstack.rpc.zmq import keys

    own, context = keys.current(), zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = own.server_public, own.server_secret
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ending = threading.Event()

    def run() -> None:
        while not ending.is_set():
            if socket.poll(100):
                caller, message = socket.recv_multipart()
                socket.send_multipart([caller, handler(message)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        ending.set()
        thread.join()
        context.destroy(0)


@contextlib.contextmanager
def _connect_zmq(address: str) -> Iterator[Client]:
    import zmq

    from rlstack.rpc.zmq import keys

    own = keys.current()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_serverkey = own.server_public
        socket.curve_publickey, socket.curve_secretkey = own.client_public, own.client_secret
        socket.connect(address)
        yield _ZmqClient(socket)


class _ZmqClient:
    """One socket answers in the order of the calls, because the server has one thread."""

    def __init__(self, socket: Any) -> None:
        self.send = socket.send
        self.receive = socket.recv


@contextlib.contextmanager
def _serve_courier(handler: Handler) -> Iterator[str]:
    import courier

    server = courier.Server()
    server.Bind("call", handler)
    server.Start()
    try:
        yield str(server.address)
    finally:
        server.Stop()
        server.Join()


@contextlib.contextmanager
def _connect_courier(address: str) -> Iterator[Client]:
    import courier

    yield _CourierClient(courier.Client(address))


class _CourierClient:
    """Has a future for each call in progress."""

    def __init__(self, client: Any) -> None:
        self._client = client  # its futures do not keep it alive
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: bytes) -> None:
        """Begins a call."""
        self._calls.put(self._client.futures.call(message))

    def receive(self) -> bytes:
        """Returns the answer to the oldest call without one."""
        answer: bytes = self._calls.get().result()
        return answer


_SERVERS = {"zmq": _serve_zmq, "courier": _serve_courier}
_CLIENTS = {"zmq": _connect_zmq, "courier": _connect_courier}
