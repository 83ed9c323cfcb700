"""Frames and primitive types of the game protocol, which docs/game_protocol.md describes.

A frame is a little-endian u32 (the number of bytes that follow), one byte (its kind), and its body.
Invalid bytes raise a `WireError`.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

VERSION = 1
MAGIC = b"RLGP"
MAX_FRAME = 16 << 20  # bytes
MAX_HELLO = 1 << 18  # bytes of the first frame, which anyone may send: it is read in 0.1 s
# Environment variables that tell a game's process where to connect, and with which token.
ADDRESS_VARIABLE, TOKEN_VARIABLE = "RLSTACK_GAME_ADDRESS", "RLSTACK_GAME_TOKEN"

_U8, _U32, _U64, _F64 = (struct.Struct(f"<{code}") for code in "BIQd")


class WireError(ValueError):
    """The other side does not follow the protocol."""


def shown(text: str, most: int = 80) -> str:
    """Returns the text of another program for a message: its repr, cut as by `printable`."""
    return printable(repr(_middle_cut(text, most)), most)


def printable(text: str, most: int = 1000) -> str:
    """Returns text that may have parts from another program as one line.

    Characters that are not printable, such as line ends and escape sequences of terminals, are
    escaped. Of more than ``most`` characters the first and the last are kept: the way out of an
    error stands at its end.
    """
    text = _middle_cut(text, most)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return _middle_cut(text, most)


def _middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    kept = (most - len(" ... ")) // 2
    return f"{text[:kept]} ... {text[-kept:]}"


class Kind(enum.IntEnum):
    """The kind of a frame."""

    HELLO = 1  # from the game: its name, number of agents and spaces
    WELCOME = 2  # to the game: version and seed
    OBSERVE = 3  # from the game: observations of agents that must act
    ACT = 4  # to the game: the actions of these agents
    GAME_OVER = 5  # from the game: an agent's last observation
    SHUTDOWN = 6  # to the game: end the loop
    ERROR = 7  # from either side: why the sender disconnects
    MANY_HELLO = 8  # from a program with many environments: its name and spaces
    MANY_WELCOME = 9  # to the program: version, threads, and the seed of each environment
    STEP = 10  # to the program: the actions of some environments
    ROWS = 11  # from the program: the newest steps of these environments


class Writer:
    """Builds a frame."""

    def __init__(self, kind: Kind):
        self._data = bytearray(_U32.pack(0) + _U8.pack(kind))

    def u8(self, value: int) -> None:
        """Appends one byte."""
        self._data += _U8.pack(value)

    def u32(self, value: int) -> None:
        """Appends an unsigned 32-bit integer."""
        self._data += _U32.pack(value)

    def u64(self, value: int) -> None:
        """Appends an unsigned 64-bit integer."""
        self._data += _U64.pack(value)

    def f64(self, value: float) -> None:
        """Appends a 64-bit float."""
        self._data += _F64.pack(value)

    def text(self, value: str) -> None:
        """Appends the number of bytes as a u32, then the text in UTF-8."""
        data = value.encode()
        self._data += _U32.pack(len(data)) + data

    def texts(self, values: Sequence[str]) -> None:
        """Appends their number as a u32, then the texts."""
        self.u32(len(values))
        for value in values:
            self.text(value)

    def u32s(self, values: Sequence[int]) -> None:
        """Appends their number as a u32, then the u32s."""
        self._data += struct.pack(f"<{len(values) + 1}I", len(values), *values)

    def array(self, values: ArrayLike, dtype: str) -> None:
        """Appends numbers without their count, because the reader knows it."""
        self._data += np.asarray(values, dtype).tobytes()

    def frame(self) -> bytes:
        """Returns the frame, with its length filled in."""
        self._data[:4] = _U32.pack(len(self._data) - 4)
        return bytes(self._data)


class Reader:
    """Reads a frame. Each method reads the next value of its body."""

    def __init__(self, data: bytes):
        if not data:
            raise WireError("a frame must have a kind; got an empty frame")
        self._data, self._at = data, 1
        try:
            self.kind = Kind(data[0])
        except ValueError:
            raise WireError(f"a frame's kind must be 1 to {len(Kind)}; got {data[0]}") from None

    def _take(self, count: int) -> int:
        """Skips ``count`` bytes and returns where they begin."""
        at = self._at
        if count > len(self._data) - at:
            raise WireError(
                f"{self.kind.name}: must have {count} more bytes at byte {at}; got "
                f"{len(self._data) - at}"
            )
        self._at = at + count
        return at

    def _integer(self, form: struct.Struct) -> int:
        return form.unpack_from(self._data, self._take(form.size))[0]

    def u8(self) -> int:
        """Reads one byte."""
        return self._integer(_U8)

    def flag(self) -> bool:
        """Reads a byte that is 0 or 1."""
        value = self.u8()
        if value > 1:
            raise WireError(f"{self.kind.name}: a flag must be 0 or 1; got {value}")
        return bool(value)

    def u32(self) -> int:
        """Reads an unsigned 32-bit integer."""
        return self._integer(_U32)

    def u64(self) -> int:
        """Reads an unsigned 64-bit integer."""
        return self._integer(_U64)

    def f64(self) -> float:
        """Reads a 64-bit float."""
        return _F64.unpack_from(self._data, self._take(_F64.size))[0]

    def count(self, what: str, most: int) -> int:
        """Reads a u32 that is at most ``most``; errors call it ``what``."""
        value = self.u32()
        if value > most:
            raise WireError(f"{self.kind.name}: {what} must be at most {most}; got {value}")
        return value

    def text(self) -> str:
        """Reads a text."""
        count = self.u32()
        at = self._take(count)
        try:
            return self._data[at : at + count].decode()
        except UnicodeDecodeError:
            raise WireError(f"{self.kind.name}: the text at byte {at} must be UTF-8") from None

    def texts(self) -> tuple[str, ...]:
        """Reads several texts."""
        return tuple(self.text() for _ in range(self.u32()))

    def u32s(self, what: str, most: int) -> list[int]:
        """Reads at most ``most`` u32s."""
        return self.array(self.count(what, most), "<u4").tolist()

    def array(self, count: int, dtype: str) -> np.ndarray:
        """Reads ``count`` numbers."""
        size = count * np.dtype(dtype).itemsize
        return (
            np.frombuffer(self._data, dtype, count, self._take(size))
            if size
            else np.empty(0, dtype)
        )

    def flags(self, count: int) -> np.ndarray:
        """Reads ``count`` bytes that are 0 or 1, as bool."""
        values = self.array(count, "u1")
        if values.size and values.max() > 1:
            raise WireError(f"{self.kind.name}: a flag must be 0 or 1; got {values.max()}")
        return values.astype(np.bool_)

    def end(self) -> None:
        """Checks that the body ends here."""
        left = len(self._data) - self._at
        if left:
            raise WireError(f"{self.kind.name}: must end here; got {left} more bytes")


def receive(
    sock: socket.socket,
    timeout: float,
    max_frame: int = MAX_FRAME,
    alive: Callable[[], bool] = lambda: True,
) -> Reader | None:
    """Returns the next frame, or None if the other side has disconnected after the last one.

    Args:
      sock: a blocking socket.
      timeout: seconds within which the whole frame must arrive.
      max_frame: maximum number of bytes of a frame.
      alive: called several times a second; False counts as a disconnection.

    Raises:
      TimeoutError: the frame did not arrive in time.
      WireError: the frame is too long or was cut off.
    """
    deadline = time.monotonic() + timeout
    head = _exactly(sock, _U32.size, deadline, alive)
    if head is None:
        return None
    size = frame_size(head, max_frame)
    body = _exactly(sock, size, deadline, alive)
    if body is None:
        raise WireError(f"a frame of {size} bytes must be complete; the connection ended within it")
    return Reader(body)


def _exactly(
    sock: socket.socket, count: int, deadline: float, alive: Callable[[], bool]
) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side has sent nothing")
        sock.settimeout(min(left, 0.2))
        try:
            part = sock.recv(min(count - len(data), 1 << 20))
        except TimeoutError:
            if alive():
                continue
            part = b""
        except OSError:  # reset by the other side, or closed here by another thread
            part = b""
        if not part:
            if data and len(data) < count:
                raise WireError("a frame must be complete; the connection ended within one")
            return None
        data += part
    return bytes(data)


def frame_size(head: bytes | bytearray, max_frame: int = MAX_FRAME) -> int:
    """Returns the number of bytes after a frame's first four.

    Raises:
      WireError: the number is 0 or above ``max_frame``.
    """
    (size,) = _U32.unpack_from(head)
    if not 0 < size <= max_frame:
        raise WireError(f"a frame must have 1 to {max_frame} bytes; got {size}")
    return size


def send(sock: socket.socket, writer: Writer, timeout: float) -> None:
    """Sends a frame.

    Raises:
      OSError: the connection has ended, or the other side does not read for ``timeout`` seconds.
    """
    sock.settimeout(timeout)
    sock.sendall(writer.frame())
