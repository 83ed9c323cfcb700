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
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

from rlstack.entity.inverted.messages import HELLO_HEAD, check_version, read_token
from rlstack.entity.inverted.wire import MAX_HELLO, Kind, Reader, WireError, Writer, frame_size

_POLL = 0.1  # seconds between checks of whether to go on waiting
_PATIENCE = 30.0  # seconds for a HELLO to arrive completely, at least
_MOST = 64  # connections without a HELLO; the oldest gives way to a new one
_LENGTH = 4  # bytes of a u32: the length of a frame, and of a text
_SEND_TIMEOUT = 1.0  # seconds; the reason of a refusal fits the socket's buffer


class Caller(NamedTuple):
    """A connection that has sent the token of an expected game."""

    connection: socket.socket
    hello: bytes  # the first frame: a HELLO, checked only up to the token


class _FirstFrame:
    """Reads the HELLO of a connection, which may arrive in parts, and no byte after it.

    Attributes:
      token: the token in the HELLO, once the whole frame has arrived.
    """

    def __init__(self, expected: Container[str]) -> None:
        """Starts without data.

        Args:
          expected: the tokens of the expected games.
        """
        self.token = ""
        self._expected, self._data = expected, bytearray()
        self._ends = self._decide()
        self._end = next(self._ends)

    def receive(self, sock: socket.socket) -> bytes | None:
        """Receives what has arrived; returns the frame, without its length, once it is complete.

        Args:
          sock: a socket that does not block.

        Raises:
          OSError: the connection has failed.
          WireError: the connection has ended, or what has come is no HELLO that is expected.
        """
        while True:
            if len(self._data) == self._end:
                end = next(self._ends, None)
                if end is None:
                    return bytes(self._data[_LENGTH:])
                self._end = end
                continue
            try:
                part = sock.recv(self._end - len(self._data))
            except BlockingIOError:
                return None
            if not part:
                raise WireError("a game must begin with HELLO; the connection ended before")
            self._data += part

    def _decide(self) -> Iterator[int]:
        """Yields where the bytes end that are needed for the next decision."""
        yield _LENGTH
        size = frame_size(self._data)
        yield _LENGTH + min(size, HELLO_HEAD)
        check_version(self._read())
        if size > MAX_HELLO:
            raise WireError(
                f"HELLO: must have at most {MAX_HELLO} bytes; got {size}. Shorten its names"
            )
        yield _LENGTH + min(size, HELLO_HEAD + _LENGTH)
        data = self._read()
        check_version(data)
        yield _LENGTH + min(size, HELLO_HEAD + _LENGTH + data.u32())
        self.token = read_token(self._read())
        if self.token not in self._expected:
            raise WireError("the token must be that of RLSTACK_GAME_TOKEN")
        yield _LENGTH + size

    def _read(self) -> Reader:
        return Reader(bytes(self._data[_LENGTH:]))


class _New(NamedTuple):
    frame: _FirstFrame
    since: float


class Hellos:
    """The connections to one listening socket that no game has taken yet.

    Attributes:
      refused: why a connection was dropped most recently; "" if none was.
    """

    def __init__(self, listening: socket.socket):
        """Makes the socket non-blocking; the caller closes it."""
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
        """Returns the next connection with an expected token.

        Args:
          token: the token.
          timeout: maximum time to wait, in seconds.
          keep_waiting: called several times a second; False ends the wait.

        Returns:
          The connection, with a blocking socket; None if the wait ended without one.
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
        self._new[connection] = _New(_FirstFrame(self._expected), time.monotonic())

    def _receive(self, sock: socket.socket) -> None:
        """Reads what a connection has sent; a whole HELLO decides whether it is a game."""
        try:
            new = self._new[sock].frame
            frame = new.receive(sock)
            if frame is None:
                return
            if new.token not in self._expected:  # until now it was
                raise WireError("no game waits for this token any more")
        except (WireError, OSError) as error:
            self._drop(sock, str(error))
            return
        del self._new[sock]
        self._known.setdefault(new.token, []).append(Caller(sock, frame))

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
