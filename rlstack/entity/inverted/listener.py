"""Sockets between rlstack and games: listen for a game's connection, and connect."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable

from rlstack.entity.inverted.hellos import Caller, Hellos
from rlstack.rpc import addresses

_UNIX = "unix:"


class Listener:
    """A listening socket.

    Attributes:
      address: ``host:port`` or ``unix:path``, for the game to connect to.
      hellos: the connections that no game has taken yet.
    """

    def __init__(self, address: str = ""):
        """Listens at an address; for "" at a free port of the loopback interface.

        Args:
          address: ``host:port``, ``unix:path`` or "".

        Raises:
          ValueError: listening at the address is not possible.
        """
        self._path = address.removeprefix(_UNIX) if address.startswith(_UNIX) else ""
        try:
            if self._path:
                _remove_stale(self._path)
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(self._path)
                self._socket.listen()
                self.address = address
            else:
                host, port = _host_and_port(address or f"{addresses.LOOPBACK}:0")
                family = addresses.family(addresses.resolved(host))
                self._socket = socket.create_server((host, port), family=family)
                self.address = addresses.join(host, self._socket.getsockname()[1])
        except OSError as error:
            raise ValueError(
                f"SocketGame: must be able to listen at {address!r}; got {error}. Choose another "
                "address. Worker processes cannot share one; worker threads can."
            ) from error
        self.hellos = Hellos(self._socket)

    def accept(self, token: str, timeout: float, keep_waiting: Callable[[], bool]) -> Caller | None:
        """Returns the next connection with a game's token; drops connections of other programs.

        Args:
          token: the token, which was given to `open_listener`.
          timeout: maximum time to wait, in seconds.
          keep_waiting: called several times a second; False ends the wait.

        Returns:
          The connection and its HELLO; None when the wait ended without one.
        """
        caller = self.hellos.next(token, timeout, keep_waiting)
        if caller is not None and not self._path:
            caller.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return caller

    def close(self) -> None:
        """Stops listening, and disconnects programs that are not games."""
        self.hellos.close()
        self._socket.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


# Listeners at addresses that the user chose, with the number of games that use each: the games of a
# process with the same address share one listener.
_shared: dict[str, tuple[Listener, int]] = {}
_shared_lock = threading.Lock()


def open_listener(address: str, token: str) -> Listener:
    """Returns the listener at an address, which accepts games with this token from now on.

    Args:
      address: ``host:port``, ``unix:path``, or "" for a new listener at a free port.
      token: the token that the game sends.

    Raises:
      ValueError: listening at the address is not possible.
    """
    if not address:
        listener = Listener()
    else:
        with _shared_lock:
            opened = _shared.get(address)
            listener, users = opened or (Listener(address), 0)
            _shared[address] = (listener, users + 1)
    listener.hellos.expect(token)
    return listener


def close_listener(address: str, token: str, listener: Listener) -> None:
    """Closes a listener of `open_listener` when the last game that uses it calls this."""
    listener.hellos.forget(token)
    if address:
        with _shared_lock:
            users = _shared.pop(address)[1] - 1
            if users:
                _shared[address] = (listener, users)
                return
    listener.close()


def connect(address: str, timeout: float) -> socket.socket:
    """Returns a connection to a listener.

    Raises:
      OSError: no program listens at the address.
      ValueError: the text is not an address.
    """
    if not address.startswith(_UNIX):
        connection = socket.create_connection(_host_and_port(address), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(address.removeprefix(_UNIX))
    except BaseException:
        connection.close()
        raise
    return connection


def _host_and_port(address: str) -> tuple[str, int]:
    host, port = addresses.split(address)
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(
            f"SocketGame: an address must be 'host:port' or 'unix:path'; got {address!r}."
        )
    return host, int(port)


def _remove_stale(path: str) -> None:
    """Removes a Unix socket that no program listens on any more."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
