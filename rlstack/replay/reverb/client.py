"""Requests of a client to a Reverb server, and waiting for the answers."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import ParamSpec, TypeVar

import numpy as np

from rlstack.replay.base import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.reverb import binding
from rlstack.replay.reverb.table_config import TableInfo

ITEMS = "items"  # the table of items
# Tables that hold one number each, which clients read from the server.
LARGEST_PRIORITY = "largest_priority"
BATCH_PORT = "batch_port"  # port of the `BatchService`

_POLL = 0.02  # seconds between two requests in `wait_while`

T = TypeVar("T")
P = ParamSpec("P")


def connect(address: str, timeout: float, closed: Callable[[], bool]) -> binding.Client:
    """Waits until the server at ``address`` has started; returns a client of it.

    Args:
      address: the server's address, ``host:port``.
      timeout: seconds to wait.
      closed: returns whether the buffer has been closed since.

    Raises:
      ReplayTimeoutError: no server answered in time.
      ReplayClosedError: the buffer was closed during the wait.
    """
    client: binding.Client = binding.load().Client(address)
    deadline = time.monotonic() + timeout
    while True:
        try:
            table_info(client, address, 1.0)
            return client
        except ReplayTimeoutError:
            if closed():
                raise ReplayClosedError("ReverbReplayBuffer: the buffer is closed.") from None
            if time.monotonic() > deadline:
                raise


def table_info(client: binding.Client, address: str, timeout: float) -> TableInfo:
    """Requests the counters of the table of items.

    Raises:
      ReplayTimeoutError: the server did not answer in time.
    """
    try:
        return table_infos(client, timeout)[ITEMS]
    except RuntimeError as error:
        raise ReplayTimeoutError(
            f"ReverbReplayBuffer: the Reverb server at {address} must answer; it did not within "
            f"{timeout:.0f} s ({error}). Is it running, and is the address right?"
        ) from None


def table_infos(client: binding.Client, timeout: float) -> dict[str, TableInfo]:
    """Requests the counters of all tables, by name."""
    infos = {}
    for message in client.ServerInfo(max(1, math.ceil(timeout))):
        numbers, messages = _parse(message)
        limiter = messages.get(5, b"")
        inserts, samples = (
            _parse(_parse(limiter)[1].get(field, b""))[0].get(2, 0) for field in (5, 6)
        )
        infos[messages[8].decode()] = TableInfo(numbers.get(7, 0), inserts, samples)
    return infos


def _parse(message: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """Parses a protocol buffer; returns its integers and its nested messages, by field number.

    Reverb's own message classes would import TensorFlow. For a repeated field, the last value
    counts.
    """
    numbers: dict[int, int] = {}
    messages: dict[int, bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            numbers[number] = varint()
            continue
        size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
        messages[number] = message[at : at + size]
        at += size
    return numbers, messages


def put_number(client: binding.Client, table: str, number: float) -> None:
    """Replaces the number in a table of one number."""
    writer = client.NewTrajectoryWriter(binding.load().ConstantChunkerOptions(1, 1), 3000)
    refs = writer.Append([np.array(number, np.float64)])
    writer.CreateItem(table, 1.0, [[refs[0]]], [True])
    writer.Flush(0, 5000)
    writer.Close()


def get_number(client: binding.Client, table: str) -> float:
    """Reads the number in a table; blocks if the table is empty or the server does not answer."""
    sampler = client.NewSampler(table, 1, 1)
    return float(sampler.GetNextTrajectory()[binding.DATA])


def wait_while(
    condition: Callable[[TableInfo], bool],
    client: binding.Client,
    address: str,
    closed: Callable[[], bool],
) -> None:
    """Waits until the table's counters no longer satisfy a condition, or the buffer is closed."""
    while not closed():
        try:
            if not condition(table_info(client, address, 1.0)):
                return
        except TimeoutError:
            pass  # the server may restart
        time.sleep(_POLL)


class CallThread:
    """Makes calls one after the other in its own thread.

    Some of Reverb's calls do not return while the server is unreachable, and cannot be interrupted.
    A thread with such a call is abandoned; it ends when the server is reachable again, or with the
    process.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reverb-calls", daemon=True)
        self._thread.start()

    def submit(
        self, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs
    ) -> Future[T]:
        """Queues a call and returns its future."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                future.set_result(function(*arguments, **keywords))
            except Exception as error:
                future.set_exception(error)

        self._queue.put(call)
        return future

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # its arguments may hold a buffer

    def close(self) -> None:
        """Ends the thread, unless a call blocks."""
        self._queue.put(None)
        self._thread.join(timeout=0.5)


def result_of(call: Future[T], where: str, address: str, timeout: float) -> T:
    """Returns a call's result.

    Raises:
      ReplayTimeoutError: the result did not arrive in time.
    """
    try:
        return call.result(timeout)
    except FutureTimeoutError:
        raise ReplayTimeoutError(
            f"{where}: the Reverb server at {address} must answer; it did not within "
            f"{timeout:g} s. Is it running?"
        ) from None


class SharedMaxima:
    """Maxima that the writing half and the reading half of a buffer share."""

    def __init__(self) -> None:
        self.version = -1  # newest params version: the one that was set, else the newest seen
        self._is_set = False
        self.largest_priority = 1.0

    def saw_version(self, version: int) -> None:
        """Updates the newest params version, unless it is set."""
        if not self._is_set:
            self.version = max(self.version, version)

    def set_version(self, version: int) -> None:
        """Sets the newest params version: items of a later one come from a lost learner."""
        self.version, self._is_set = version, True

    def saw_priority(self, priority: float) -> None:
        """Updates the largest priority."""
        self.largest_priority = max(self.largest_priority, priority)
