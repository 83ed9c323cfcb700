"""The client's end of calls over ZeroMQ.

A call has a connection for itself, from a few that a channel keeps open. So the calling thread
sends and receives by itself: no other thread has to be woken. The socket's monitor tells it at once
when the connection fails, and a descriptor when the call is cancelled.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
import weakref
from typing import Any

import zmq

from rlstack.rpc import addresses
from rlstack.rpc.zmq import keys, options

_KEPT = 16  # connections that a channel keeps for later calls; more calls at once open new ones
_SOCKETS = 16_384  # most sockets of this process's clients; a connection takes three
_NEVER = 3_600_000  # milliseconds; by then a connection that broke has long been closed
_EVENT = struct.Struct("=Hi")  # an event of a monitor: its kind and a value
_READY = zmq.EVENT_HANDSHAKE_SUCCEEDED
_FAILED = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_REFUSED = _FAILED & ~(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)


class Channel:
    """The connections to one address, and their calls in progress."""

    in_process = False

    def __init__(self, address: str) -> None:
        """Connects at the first call; `address` is "host:port"."""
        self._address, self._keys = address, keys.current()
        self._cancelled = False
        self._begin()
        _channels.add(self)

    def _begin(self) -> None:
        """Starts without connections."""
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        # Readable from `cancel` on; nobody reads it, so it wakes all calls.
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end = weakref.finalize(self, _close, self._cancel, self._idle)

    def begin_in_child(self) -> None:
        """Leaves the connections to the parent: a forked process must not use or close them."""
        self._end.detach()
        _of_parent.append(self._idle)
        os.close(self._cancel)  # this process's copy of the descriptor
        self._begin()

    def call(self, method: str, data: bytes, timeout: float) -> tuple[str, Any]:
        """Calls once; see `rlstack.rpc.transports.Channel`."""
        if len(data) > options.MAX_MESSAGE:
            raise ValueError(
                f"zmq: a message must have at most {options.MAX_MESSAGE:,} bytes; got "
                f"{len(data):,}. Send it in parts."
            )
        until = time.monotonic() + timeout
        connection = self._take()
        try:
            if connection is None:
                try:
                    place = _resolved(self._address)
                except OSError as error:
                    return "UNAVAILABLE", f"{self._address} is not known here: {error.strerror}"
                connection = _Connection(place, self._keys)
                status, answer = connection.wait_until_ready(until, self._cancel)
                if status != "OK":
                    return status, answer
            status, answer = connection.call(method, data, until, self._cancel)
            if status == "OK" or status == "NOT_FOUND":  # else an answer may still come
                connection = self._put_back(connection)
            return status, answer
        finally:
            if connection is not None:
                connection.close()

    def cancel(self) -> None:
        """Cancels all calls in progress and all later ones."""
        with self._lock:
            self._cancelled = True
            idle = self._idle[:]
            self._idle.clear()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._cancel, 1)
        for connection in idle:
            connection.close()

    def _take(self) -> _Connection | None:
        """Returns a connection that still stands, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.is_alive():
                return connection
            connection.close()

    def _put_back(self, connection: _Connection) -> _Connection | None:
        """Keeps a connection for later calls; returns it if it must be closed instead."""
        with self._lock:
            if self._cancelled or len(self._idle) >= _KEPT:
                return connection
            self._idle.append(connection)
        return None


class _Connection:
    """A socket that is connected to a server, for one call at a time."""

    def __init__(self, address: str, own: keys.Keys) -> None:
        self._address, self._failed = address, False
        self._socket: zmq.Socket = _client_context().socket(zmq.DEALER)
        options.set_options(self._socket)
        self._socket.curve_serverkey = own.server_public
        self._socket.curve_publickey = own.client_public
        self._socket.curve_secretkey = own.client_secret
        # A server that has failed may be restarted; a `RemoteObject` then opens a new connection.
        # With -1 ZeroMQ would drop an answer that came just before the connection was closed.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER)
        self._monitor = self._socket.get_monitor_socket(_READY | _FAILED)
        self._socket.setsockopt(zmq.IPV6, int(address.startswith("[")))
        self._socket.connect(f"tcp://{address}")

    def wait_until_ready(self, until: float, cancel: int) -> tuple[str, Any]:
        """Waits until the server has admitted this client."""
        while True:
            waits = [(self._monitor, zmq.POLLIN), (cancel, zmq.POLLIN)]
            ready = dict(zmq.zmq_poll(waits, _ms(until)))
            if cancel in ready:
                return "CANCELLED", "the channel was cancelled"
            if not ready and time.monotonic() >= until:
                return "UNAVAILABLE", f"{self._address} did not accept the connection in time"
            event = self._event()
            if event == _READY:
                return "OK", b""
            if event & _REFUSED:
                return "UNAVAILABLE", (
                    f"{self._address} does not admit the keys of this program; it may belong to "
                    "another one"
                )
            if event:
                return "UNAVAILABLE", f"{self._address} did not accept the connection"

    def call(self, method: str, data: bytes, until: float, cancel: int) -> tuple[str, Any]:
        """Sends a request and waits for its answer."""
        try:
            options.send(self._socket, method.encode(), data)
        except zmq.Again:  # a socket that has lost its connection would wait for another
            return "UNAVAILABLE", f"the connection to {self._address} broke"
        waits = [(self._socket, zmq.POLLIN), (self._monitor, zmq.POLLIN), (cancel, zmq.POLLIN)]
        while True:
            ready = dict(zmq.zmq_poll(waits, _ms(until)))
            if self._socket in ready:
                return self._answer()
            if cancel in ready:
                return "CANCELLED", "the channel was cancelled"
            if self._monitor in ready and self._event() & _FAILED:
                if options.has_message(self._socket):
                    return self._answer()  # it came before the connection broke
                return "UNAVAILABLE", f"the connection to {self._address} broke"
            if not ready and time.monotonic() >= until:
                return "DEADLINE_EXCEEDED", "no answer before the deadline"

    def is_alive(self) -> bool:
        """Whether the connection has not failed since the last call."""
        while not self._failed and options.has_message(self._monitor):
            self._event()
        return not self._failed

    def close(self) -> None:
        """Closes the connection; unsent data is dropped."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _answer(self) -> tuple[str, Any]:
        status, *rest = options.receive(self._socket)
        if len(rest) != 1:
            return "INTERNAL", f"{self._address} sent an answer of {1 + len(rest)} parts"
        name, answer = status.bytes, options.bytes_of(rest[0])
        if name == options.OK:
            return "OK", answer
        known = name if name in (options.NOT_FOUND, options.FAILED) else options.FAILED
        return known.decode(), bytes(answer).decode(errors="replace")

    def _event(self) -> int:
        """Returns the next event of the connection, 0 if there is none."""
        try:
            message, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return 0
        event = int(_EVENT.unpack(message)[0])
        self._failed |= bool(event & _FAILED)
        return event


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_lock = threading.Lock()
_context: zmq.Context | None = None
_of_parent: list[object] = []  # what a forked process must not free


def _client_context() -> zmq.Context:
    """Returns the context of this process's clients; makes it at the first call."""
    global _context
    with _lock:
        if _context is None:
            _context = zmq.Context()
            _context.set(zmq.MAX_SOCKETS, _SOCKETS)
        return _context


def _after_fork() -> None:
    global _context, _lock
    _of_parent.append(_context)
    _context, _lock = None, threading.Lock()
    for channel in list(_channels):
        channel.begin_in_child()


os.register_at_fork(after_in_child=_after_fork)


def _close(cancel: int, idle: list[_Connection]) -> None:
    """Closes the remaining connections of a channel that was garbage-collected."""
    for connection in idle:
        connection.close()
    os.close(cancel)


def _ms(until: float) -> int:
    """Returns the milliseconds until a time, rounded up."""
    return max(0, math.ceil(1e3 * (until - time.monotonic())))


def _resolved(address: str) -> str:
    """Returns the address with a number as its host; ZeroMQ would look names up in its one thread.

    Raises:
      OSError: the host is not known.
    """
    host, port = addresses.split(address)
    return addresses.join(addresses.resolved(host), port)
