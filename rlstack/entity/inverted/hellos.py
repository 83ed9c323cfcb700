"""Finds the games among all programs that connect to a listening socket.

Any program of this machine may connect. One that sends nothing, or something else than a HELLO with
the token of a game that is expected here, must neither end the wait for the game nor delay it. So
all new connections are read at the same time.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rlstack.entity.inverted.messages import read_token
from rlstack.entity.inverted.wire import FirstFrame, Kind, Reader, WireError, Writer

_POLL = 0.1  # seconds between checks of whether to go on waiting
_PATIENCE = 30.0  # seconds for a HELLO to arrive completely, at least
_MOST = 64  # connections without a HELLO; the oldest gives way to a new one
_SEND_TIMEOUT = 1.0  # seconds; the reason of a refusal fits the socket's buffer


class Caller(NamedTuple):
    """A connection with the token of a game that is expected."""

    connection: socket.socket
    hello: bytes  # its first frame: a HELLO up to the token; the rest is not checked


class _New(NamedTuple):
    frame: FirstFrame
    since: float


class Hellos:
    """The connections to one listening socket that no game has taken yet.

    Attributes:
      refused: why a connection was dropped most recently; "" if none was.
    """

    def __init__(self, listening: socket.socket):
        """Takes a listening socket, which the caller closes."""
        listening.setblocking(False)
        self.refused = ""
        self._listening, self._lock = listening, threading.Lock()
        self._expected: dict[str, int] = {}  # by token: number of games that wait for it
        self._new: dict[socket.socket, _New] = {}
        self._known: dict[str, list[Caller]] = {}  # by token
        self._closed = False

    def expect(self, token: str) -> None:
        """Accepts connections with this token until `forget`."""
        with self._lock:
            self._expected[token] = self._expected.get(token, 0) + 1

    def forget(self, token: str) -> None:
        """Undoes `expect`."""
        with self._lock:
            self._expected[token] -= 1
            if not self._expected[token]:
                del self._expected[token]
                for caller in self._known.pop(token, []):
                    caller.connection.close()

    def next(self, token: str, timeout: float, keep_waiting: Callable[[], bool]) -> Caller | None:
        """Returns the next connection with a token that is expected.

        Args:
          token: the token.
          timeout: in seconds.
          keep_waiting: called several times a second; False ends the wait.

        Returns:
          The connection, which blocks; None if the wait ended without one.
        """
        deadline = time.monotonic() + timeout
        over = False
        while not over:
            over = not keep_waiting() or time.monotonic() >= deadline
            with self._lock:
                if self._closed:
                    return None
                if over:
                    self._read_all()
                elif not self._known.get(token):
                    self._read(_POLL)
                if callers := self._known.get(token):
                    caller = callers.pop(0)
                    caller.connection.setblocking(True)
                    return caller
        return None

    def _read_all(self) -> None:
        """Reads what has arrived: a game may have sent a HELLO with a refusal, and ended."""
        for _ in range(2 * _MOST):
            if not self._read(0.0):
                return

    def _read(self, timeout: float) -> bool:
        """Accepts connections and reads what they have sent; waits for either.

        Returns:
          Whether there was anything.
        """
        with selectors.DefaultSelector() as selector:
            for sock in (self._listening, *self._new):
                selector.register(sock, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(timeout)]
        for sock in list(self._new):
            if sock in ready:
                self._receive(sock)
            elif time.monotonic() > self._new[sock].since + _PATIENCE:
                self._drop(sock, f"a game must begin with HELLO; got nothing for {_PATIENCE:g} s")
        if self._listening in ready:
            self._accept()
        return bool(ready)

    def _accept(self) -> None:
        try:
            connection = self._listening.accept()[0]
        except OSError:  # the other side has disconnected already, or no descriptor is free
            time.sleep(_POLL)
            return
        connection.setblocking(False)
        if len(self._new) == _MOST:
            self._drop(next(iter(self._new)), "too many connections sent no HELLO")
        self._new[connection] = _New(FirstFrame(), time.monotonic())

    def _receive(self, sock: socket.socket) -> None:
        """Reads what a connection has sent; a whole HELLO decides whether it is a game."""
        try:
            frame = self._new[sock].frame.receive(sock)
            if frame is None:
                return
            token = read_token(Reader(frame))
            if token not in self._expected:
                raise WireError("the token must be that of RLSTACK_GAME_TOKEN")
        except (WireError, OSError) as error:
            self._drop(sock, str(error))
            return
        del self._new[sock]
        self._known.setdefault(token, []).append(Caller(sock, frame))

    def _drop(self, sock: socket.socket, reason: str) -> None:
        """Disconnects a program that is no game, and tells it why."""
        self.refused = reason
        del self._new[sock]
        out = Writer(Kind.ERROR)
        out.text(reason)
        with contextlib.suppress(OSError), sock:
            sock.settimeout(_SEND_TIMEOUT)
            sock.sendall(out.frame())

    def close(self) -> None:
        """Disconnects all programs that no game has taken."""
        self._closed = True  # a wait in another thread ends within its poll
        with self._lock:
            known = [caller.connection for callers in self._known.values() for caller in callers]
            for connection in (*self._new, *known):
                connection.close()
            self._new.clear()
            self._known.clear()
