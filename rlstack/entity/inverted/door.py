"""Where games knock: a listening socket, and the process that is told of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable

ADDRESS, TOKEN = "RLSTACK_GAME_ADDRESS", "RLSTACK_GAME_TOKEN"  # environment variables
_UNIX = "unix:"
_POLL = 0.1  # seconds between looks at a process that should connect
_GRACE = 2.0  # seconds that a process may take to end by itself


class Door:
    """A listening socket.

    Attributes:
      address: ``host:port`` or ``unix:path``, for the game.
    """

    def __init__(self, address: str = ""):
        """Listens at ``host:port``, ``unix:path``, or for "" at a free port of this machine alone.

        Raises:
          ValueError: nobody can listen there.
        """
        self._path = address.removeprefix(_UNIX) if address.startswith(_UNIX) else ""
        self._lock = threading.Lock()
        try:
            if self._path:
                _remove_stale(self._path)
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.bind(self._path)
                self._socket.listen()
                self.address = address
                return
            host, port = parse(address or "127.0.0.1:0")
            self._socket = socket.create_server((host, port))
            self.address = f"{host}:{self._socket.getsockname()[1]}"
        except OSError as error:
            raise ValueError(
                f"SocketGame: must be able to listen at {address!r}: {error}. Choose another "
                "address; worker processes cannot share one, threads can."
            ) from error

    def admit(self, timeout: float, alive: Callable[[], bool]) -> socket.socket | None:
        """Returns the next connection; None when there is none in time or ``alive`` says False."""
        deadline = time.monotonic() + timeout
        while alive() and time.monotonic() < deadline:
            with self._lock:
                self._socket.settimeout(_POLL)
                try:
                    connection = self._socket.accept()[0]
                except TimeoutError:
                    continue
                except OSError:  # closed meanwhile
                    return None
            if not self._path:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        return None

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


class _Doors:
    """Doors at addresses of the user's choice, which all games of this process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.doors: dict[str, tuple[Door, int]] = {}


_SHARED = _Doors()


def open_door(address: str) -> Door:
    """Returns the door at an address; of "" each caller gets one of its own.

    Raises:
      ValueError: nobody can listen there.
    """
    if not address:
        return Door()
    with _SHARED.lock:
        door, users = _SHARED.doors.get(address, (None, 0))
        door = door or Door(address)
        _SHARED.doors[address] = (door, users + 1)
        return door


def close_door(address: str, door: Door) -> None:
    """Closes what `open_door` returned, when nobody uses it any more."""
    if address:
        with _SHARED.lock:
            users = _SHARED.doors.pop(address)[1] - 1
            if users:
                _SHARED.doors[address] = (door, users)
                return
    door.close()


def parse(address: str) -> tuple[str, int]:
    """Returns host and port.

    Raises:
      ValueError: it is no address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(
            f"SocketGame: an address must be 'host:port' or 'unix:path'; got {address!r}."
        )
    return host, int(port)


def connect(address: str, timeout: float) -> socket.socket:
    """Returns a connection to a door.

    Raises:
      OSError: nobody listens there.
    """
    if not address.startswith(_UNIX):
        connection = socket.create_connection(parse(address), timeout)
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


def launch(command: str, address: str, token: str) -> subprocess.Popen:
    """Starts a game's command, in a session of its own: Ctrl-C is for whoever started it.

    Raises:
      OSError: there is no such program.
      ValueError: it is no command.
    """
    arguments = shlex.split(command)
    if not arguments:
        raise ValueError(f"SocketGame: command must name a program; got {command!r}.")
    return subprocess.Popen(
        arguments,
        env={**os.environ, ADDRESS: address, TOKEN: token},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_process(process: subprocess.Popen) -> None:
    """Waits a moment for a process to end, then ends it and all that it started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _remove_stale(path: str) -> None:
    """Removes a socket that nobody listens to any more."""
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
