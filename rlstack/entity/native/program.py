"""A program with many environments: its process, and the messages between it and its pool."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlstack.entity.inverted import wire
from rlstack.entity.inverted.listener import Listener
from rlstack.entity.inverted.messages import read_spaces, read_token
from rlstack.entity.inverted.remote_game import SEND_TIMEOUT, start_program, stop_program
from rlstack.entity.inverted.wire import Kind, Reader, WireError, Writer
from rlstack.entity.native.rows import Rows, RowsLayout
from rlstack.entity.spaces import ActionSpace, ObsSpace

_MANY_VARIABLE = "RLSTACK_GAME_MANY"
_MAX_PATH = 100  # bytes of a Unix socket's path; the systems allow 104 or 108
_HEAD = 13  # bytes of a frame before the columns: length, kind, rows, episodes with metrics
_PAD = 3  # so that the columns are aligned


class Lost(RuntimeError):  # noqa: N818 (the message has the error)
    """The program has ended, is silent, or broke the protocol. Another one may be started.

    Attributes:
      waited: seconds for which it was silent, if that is the reason.
    """

    def __init__(self, reason: str, waited: float = 0.0):
        super().__init__(reason)
        self.waited = waited


class Spaces(NamedTuple):
    """The content of MANY_HELLO."""

    name: str
    obs_space: ObsSpace
    action_space: ActionSpace


class Program:
    """A running program and the connection to it.

    Attributes:
      spaces: the spaces that the program's greeting declares.
    """

    def __init__(self, command: Sequence[str], start_timeout: float):
        """Starts the program and waits for its greeting.

        Raises:
          ValueError: the program refuses its options.
          WireError: the program has another version of the protocol, or does not follow it.
          Lost: the program did not start, or did not connect.
        """
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            # Removed once the program has connected, so that a killed trainer leaves no files.
            with tempfile.TemporaryDirectory(prefix="rlstack-") as directory:
                hello = self._connect(command, os.path.join(directory, "socket"), start_timeout)
            self.spaces = _read_hello(Reader(hello))
        except BaseException as error:
            if isinstance(error, WireError):
                self.refuse(str(error))
            self.close()
            if isinstance(error, OSError):
                raise Lost(f"it did not start: {error}") from error
            raise

    def _connect(self, command: Sequence[str], path: str, timeout: float) -> bytes:
        """Starts the program, which connects to a Unix socket or to TCP; returns its greeting."""
        short = len(os.fsencode(path)) <= _MAX_PATH
        token = secrets.token_hex(16)
        listener = Listener(f"unix:{path}" if short else "")
        try:
            listener.hellos.expect(token)
            self._process = start_program(command, listener.address, token, **{_MANY_VARIABLE: "1"})
            caller = listener.accept(token, timeout, lambda: self.exit_code() is None)
            if caller is None:
                refused = listener.hellos.refused
                raise Lost(
                    f"it did not connect within {timeout:g} s{self.ended()}"
                    + (f" The last connection was refused: {refused}." if refused else "")
                )
        finally:
            listener.close()
        self._connection = caller.connection
        return caller.hello

    def welcome(self, seeds: Sequence[int], threads: int) -> None:
        """Tells the program to build one environment for each seed.

        Raises:
          Lost: the program has ended.
        """
        out = Writer(Kind.MANY_WELCOME)
        out.u32(wire.VERSION)
        out.u32(threads)
        out.u32(len(seeds))
        for seed in seeds:
            out.u64(seed)
        self._send(out)

    def step(self, ids: np.ndarray, actions: bytes, reset: bool) -> None:
        """Sends the actions of some environments.

        Raises:
          Lost: the program has ended.
        """
        out = Writer(Kind.STEP)
        out.u8(reset)
        out.u32(len(ids))
        out.array(ids, "<u4")
        out.array(np.frombuffer(actions, np.uint8), "u1")
        self._send(out)

    def _send(self, out: Writer) -> None:
        assert self._connection is not None
        try:
            wire.send(self._connection, out, SEND_TIMEOUT)
        except OSError as error:
            raise Lost(self._last_words() or f"{error}{self.ended()}") from error

    def rows(
        self, layout: RowsLayout, ids: np.ndarray, first: np.ndarray, timeout: float
    ) -> tuple[Rows, Mapping[int, dict[str, float]]]:
        """Receives the answer to `step`, and the metrics of episodes that ended, by row.

        Raises:
          Lost: the program has ended, sent nothing for ``timeout`` seconds, or broke the protocol.
        """
        assert self._connection is not None
        n = len(ids)
        size = _HEAD + n * layout.row_size
        data = np.empty(_PAD + size, np.uint8)
        view = data.data[_PAD:]
        deadline = time.monotonic() + timeout
        try:
            filled = self._fill(view, 5, deadline)
            length = wire.frame_size(bytes(view[:4]))
            if view[4] != Kind.ROWS or length < size - 4:
                rest = bytearray(max(0, length + 4 - filled))
                self._fill(memoryview(rest), len(rest), deadline)
                self._refuse_frame(bytes(view[4 : min(filled, length + 4)]) + bytes(rest))
            self._fill(view[filled:], size - filled, deadline)
            rest = bytearray(length + 4 - size)
            self._fill(memoryview(rest), len(rest), deadline)
            return self._read(layout, data, rest, ids, first)
        except TimeoutError:
            raise Lost(f"it was silent for {timeout:g} s.", timeout) from None
        except WireError as error:
            self.refuse(str(error))
            raise Lost(f"{error}.") from error
        except OSError as error:
            raise Lost(f"{error}{self.ended()}") from error

    def _fill(self, view: memoryview, least: int, deadline: float) -> int:
        """Receives at least ``least`` bytes into ``view``; returns the number of bytes received."""
        assert self._connection is not None
        filled = 0
        while filled < least:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            count = self._connection.recv_into(view[filled:])
            if not count:
                raise ConnectionError("it disconnected")
            filled += count
        return filled

    def _refuse_frame(self, frame: bytes) -> None:
        """Raises the error that a frame without rows reports, or is."""
        data = Reader(frame)
        if data.kind is Kind.ERROR:
            raise Lost(f"it reports: {wire.printable(data.text())}.")
        rule = "STEP must be answered by one row for each environment, or ERROR"
        raise WireError(f"{rule}; got {data.kind.name} of {len(frame)} bytes")

    def _read(
        self,
        layout: RowsLayout,
        data: np.ndarray,
        rest: bytearray,
        ids: np.ndarray,
        first: np.ndarray,
    ) -> tuple[Rows, Mapping[int, dict[str, float]]]:
        n = len(ids)
        count, episodes = np.ndarray((2,), "<u4", data, _PAD + 5).tolist()
        if count != n:
            raise WireError(f"ROWS: must have {n} rows, one for each environment; got {count}")
        rows = layout.read(data[_PAD + _HEAD :], ids, first)
        reader = Reader(bytes([Kind.ROWS]) + rest)
        metrics = {}
        for _ in range(min(episodes, n)):
            row = reader.count("a row", n - 1)
            metrics[row] = {reader.text(): reader.f64() for _ in range(reader.u32())}
        reader.end()
        return rows, metrics

    def _last_words(self) -> str:
        """Returns the error that the program reported before it disconnected; "" if none."""
        assert self._connection is not None
        with contextlib.suppress(OSError, ValueError):
            while (data := wire.receive(self._connection, 1.0)) is not None:
                if data.kind is Kind.ERROR:
                    return f"it reports: {wire.printable(data.text())}."
        return ""

    def exit_code(self) -> int | None:
        """Returns the exit code of the process; None while it runs."""
        return None if self._process is None else self._process.poll()

    def ended(self) -> str:
        """Returns the last part of a message: the exit code, if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(0.2)
        code = self.exit_code()
        return "." if code is None else f"; its process ended with code {code}."

    def refuse(self, reason: str) -> None:
        """Tells the program why the connection ends."""
        if self._connection is not None:
            out = Writer(Kind.ERROR)
            out.text(reason)
            with contextlib.suppress(OSError):
                wire.send(self._connection, out, SEND_TIMEOUT)

    def close(self) -> None:
        """Ends the program."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                wire.send(connection, Writer(Kind.SHUTDOWN), 1.0)
            connection.close()
        process, self._process = self._process, None
        if process is not None:
            stop_program(process)


def _read_hello(data: Reader) -> Spaces:
    """Returns the contents of MANY_HELLO.

    Raises:
      ValueError: the program refuses its options.
      WireError: the message is not a MANY_HELLO of this version.
    """
    if data.kind is Kind.HELLO:
        raise WireError(
            "the program plays one game; make it the command of "
            "rlstack.entity.inverted:SocketGame instead"
        )
    read_token(data)
    name, refusal = data.text(), data.text()
    if refusal:
        raise ValueError(wire.printable(refusal))
    spaces = Spaces(name, *read_spaces(data))
    data.end()
    return spaces
