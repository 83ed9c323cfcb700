"""The pool of a program that steps all its environments, see `rlstack.envs.backend.Backend`.

`Program` is the process, with the messages between it and the pool.

A program that ends, falls silent or breaks the protocol is started again with new seeds. The
episodes of its environments end as truncated: LAST, reward 0, discount 1, the last observation that
was received.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlstack.checks import EnvCrash, EnvError
from rlstack.entity.inverted import wire
from rlstack.entity.inverted.listener import Listener
from rlstack.entity.inverted.messages import read_spaces, read_token
from rlstack.entity.inverted.remote_game import SEND_TIMEOUT, start_program, stop_program
from rlstack.entity.inverted.wire import Kind, Reader, WireError, Writer
from rlstack.entity.native.rows import Rows, RowsLayout, joined
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.envs.auto_reset import LAST
from rlstack.envs.backend import PoolConfig, spec_fields
from rlstack.envs.episode_metrics import by_name
from rlstack.envs.nest import StepNest
from rlstack.envs.process.restarts import RestartLimit
from rlstack.types import TimeStep

_MAX_UNANSWERED = 1 << 15  # bytes of actions; more could fill the sockets of both directions
_SEED_SHIFT = 32  # each start has its own seeds: the environment's plus this power of two

_MANY_VARIABLE = "RLSTACK_GAME_MANY"
_MAX_PATH = 100  # bytes of a Unix socket's path; the systems allow 104 or 108
_HEAD = 13  # bytes of a frame before the columns: length, kind, rows, episodes with metrics
_PAD = 3  # so that the columns are aligned

_log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """A message that the program has not answered yet."""

    ids: np.ndarray
    first: np.ndarray  # bool, where an episode begins
    size: int  # bytes of actions


class ProgramBackend:
    """A program with all environments of a pool.

    Rows arrive message by message: an asynchronous pool receives first what it sent first.
    """

    def __init__(self, path: str, config: PoolConfig):
        """Starts the program and builds the environments in it.

        Args:
          path: path of the program. It gets the options of the config as arguments ``name=value``.
          config: the config of the pool. ``num_workers`` is the number of threads, by default one
            for each core.

        Raises:
          ValueError: there is no such program, or the program refuses its options.
          EnvError: the program does not follow the protocol.
          EnvCrash: the program ended while it started.
        """
        self._name = f"rust:{path}"
        if "extras" in config.options:
            raise ValueError(
                f"{self._name}: the option extras must be left out, because the rows of a program "
                "have no place for extras. Environments of Gymnasium, dm_env, EnvPool and JAX have "
                "them, and so have the games of rlstack.entity.inverted:SocketGame."
            )
        self._config, size = config, config.size
        self._command = [_find(path), *(f"{k}={_text(v)}" for k, v in config.options.items())]
        self.last_restart = ""  # reason of the last restart
        self._limit = RestartLimit(config.max_restarts, config.restart_window)
        self._running: list[Program] = []  # one at most
        self._finalizer = weakref.finalize(self, _close_all, self._running)
        try:
            program = self._open()
            self._spaces = program.spaces
            self._layout = RowsLayout(*program.spaces[1:], self._name)
            self._check_size()
            program.welcome(self._seeds(), config.num_workers or 0)
        except Lost as error:
            self.close()
            raise EnvCrash(f"{self._name}: {error}") from error
        except WireError as error:
            self.close()
            raise EnvError(f"{self._name}: {error}.") from error
        except ValueError as error:
            self.close()
            raise ValueError(f"{self._name}: {str(error).removesuffix('.')}.") from error
        observation = self._layout.observation
        self.spec, self.action_dtypes, self.action_offsets = spec_fields(
            StepNest(observation.unflatten(observation.leaves)), self._layout.action
        )
        self._ids = np.arange(size, dtype=np.int32)
        self._over = np.ones(size, bool)  # whether the next row begins an episode
        self._lost = np.zeros(size, bool)  # whether the program ended while the caller held the row
        self._newest: Rows | None = None  # newest rows of all environments, in order
        self._owns_newest = False  # whether no caller holds arrays of these rows
        self._asked: deque[_Asked] = deque()
        self._ready: deque[Rows] = deque()
        self._metrics: dict[
            int, dict[str, float]
        ] = {}  # metrics of each environment's last episode
        self._began = False  # whether a program has answered
        self._working_since = time.monotonic()

    def _open(self) -> Program:
        program = Program(self._command, self._config.start_timeout)
        self._running.append(program)
        return program

    def _seeds(self) -> list[int]:
        start = self._limit.total << _SEED_SHIFT
        return [start + self._config.seed + i for i in range(self._config.size)]

    def _check_size(self) -> None:
        size = self._config.size * self._layout.row_size
        if size + 64 > wire.MAX_FRAME:
            raise ValueError(
                f"the padded observations of {self._config.size} environments must fit "
                f"{wire.MAX_FRAME} bytes; got {size}. Lower num_envs or the capacities"
            )

    def reset(self) -> None:
        """Starts a new episode in every environment."""
        self._lost[:], self._over[:] = False, True
        self._ready.clear()
        nothing = bytes(4 * self._layout.num_choices * self._config.size)
        self._ask(self._ids, nothing, reset=True)

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        ids = self._ids if env_ids is None else env_ids
        lost = self._lost[ids]
        if lost.any():
            self._truncate(ids[lost])
            self._lost[ids] = False
            ids, actions = ids[~lost], [leaf[~lost] for leaf in actions]
        if len(ids):
            self._ask(ids, self._layout.write_actions(actions), reset=False)

    def _ask(self, ids: np.ndarray, actions: bytes, reset: bool) -> None:
        size = len(actions)
        while self._asked and sum(asked.size for asked in self._asked) + size > _MAX_UNANSWERED:
            self._receive()
        self._asked.append(_Asked(ids, self._over[ids], size))
        try:
            self._running[0].step(ids, actions, reset)
        except Lost as error:
            self._restart(error)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the rows of ``wait_num`` environments.

        Raises:
          EnvCrash: the program was lost too often; the message says why.
        """
        wanted, parts = self._config.wait_num, []
        while wanted:
            while not self._ready:
                self._receive()
            rows = self._ready.popleft()
            if len(rows.ids) > wanted:
                self._ready.appendleft(rows.take(slice(wanted, None)))
                rows = rows.take(slice(wanted))
            parts.append(rows)
            wanted -= len(rows.ids)
        rows = joined(parts)
        if len(parts) > 1 and len(rows.ids) == self._config.size:
            rows = rows.take(np.argsort(rows.ids))
        observation = self._layout.observation.unflatten(rows.leaves)
        return rows.ids.copy(), TimeStep(rows.step_type, rows.reward, rows.discount, observation)

    def _receive(self) -> None:
        """Waits for the program's next answer."""
        asked = self._asked[0]
        try:
            rows, metrics = self._running[0].rows(
                self._layout, asked.ids, asked.first, self._config.step_timeout
            )
        except Lost as error:
            self._restart(error)
            return
        self._began = True
        self._asked.popleft()
        over = rows.step_type == LAST
        if over.any():
            for i in asked.ids[over].tolist():
                self._metrics.pop(i, None)
        for row, values in metrics.items():
            self._metrics[int(asked.ids[row])] = {
                name: value for name, value in values.items() if math.isfinite(value)
            }
        self._over[asked.ids] = over
        self._keep(rows)
        self._ready.append(rows)

    def _keep(self, rows: Rows) -> None:
        """Stores the newest rows, which end the episodes if the program is lost."""
        if len(rows.ids) == self._config.size:
            self._newest, self._owns_newest = rows, False
            return
        assert self._newest is not None
        if not self._owns_newest:
            self._newest, self._owns_newest = self._newest.take(self._ids), True
        for newest, leaf in zip(self._newest.leaves, rows.leaves, strict=True):
            newest[rows.ids] = leaf

    def _truncate(self, ids: np.ndarray) -> None:
        """Ends the episodes of environments with their last observations."""
        assert self._newest is not None
        n = len(ids)
        leaves = self._newest.take(ids).leaves
        self._ready.append(
            Rows(
                ids,
                np.full(n, LAST, np.int32),
                np.zeros(n, np.float32),
                np.ones(n, np.float32),
                leaves,
            )
        )
        self._over[ids] = True
        for i in ids.tolist():
            self._metrics.pop(i, None)

    def _restart(self, lost: Lost) -> None:
        """Restarts the program, and answers the messages that the old process did not answer."""
        asked, self._asked = list(self._asked), deque()
        held = np.ones(self._config.size, bool)
        for message in asked:
            held[message.ids] = False
        while True:
            _close_all(self._running)
            worked = time.monotonic() - self._working_since - lost.waited
            if not self._began or not self._limit.count(worked):
                limit = self._limit.text if self._began else "no restarts before the first rows"
                raise EnvCrash(f"{self._name}: there may be {limit}; it was lost once more: {lost}")
            self.last_restart = str(lost)
            _log.warning(
                "%s restarted (%d so far), its episodes are truncated: %s",
                self._name,
                self._limit.total,
                lost,
            )
            try:
                self._start_again()
                break
            except Lost as error:
                lost = error
            finally:
                self._working_since = time.monotonic()
        self._lost |= held & ~self._over
        for message in asked:
            going_on = ~message.first
            if going_on.any():
                self._truncate(message.ids[going_on])
            again = message.ids[message.first]
            if len(again):
                self._over[again] = True
                self._ask(again, bytes(4 * self._layout.num_choices * len(again)), reset=True)

    def _start_again(self) -> None:
        try:
            program = self._open()
        except (WireError, ValueError) as error:
            raise Lost(f"{error}.") from error
        if program.spaces != self._spaces:
            raise EnvError(f"{self._name}: must have the same spaces when it is started again.")
        program.welcome(self._seeds(), self._config.num_workers or 0)

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the metrics of the last episodes of these environments, by name."""
        return by_name(self._metrics.get(i, {}) for i in env_ids.tolist())

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns an empty dict for each environment: programs give numbers of episodes only."""
        return [{} for _ in env_ids]

    def stats(self) -> dict[str, int]:
        """Returns ``restarts``, the number of times that the program was started again."""
        return {"restarts": self._limit.total}

    def close(self) -> None:
        """Ends the program."""
        self._finalizer()


def _close_all(running: list[Program]) -> None:
    while running:
        running.pop().close()


def _find(path: str) -> str:
    """Returns the program at a path.

    Raises:
      ValueError: there is no program at the path.
    """
    here = os.path.abspath(os.path.expanduser(path))
    if path and os.path.isfile(here) and os.access(here, os.X_OK):
        return here
    if path and os.sep not in path and (found := shutil.which(path)):
        return found
    raise ValueError(
        f"rust:{path}: must name a program that can be run; there is none at {here!r}. Build it "
        "with `cargo build --release`."
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
