"""The tables of a Reverb server, and what its clients may ask it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlstack.replay.base import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.reverb import binding
from rlstack.replay.reverb.rules import TableInfo

ITEMS = "items"
# Tables of one number, which the server's clients ask for.
LARGEST_PRIORITY = "largest_priority"
BATCH_PORT = "batch_port"  # of the service that hands out whole batches


def connect(address: str, timeout: float, closed: Callable[[], bool]) -> Any:
    """Returns a client of the server at an address, waiting for it to come up.

    Raises:
      ReplayTimeoutError: nobody answered in time.
      ReplayClosedError: ``closed`` said so meanwhile.
    """
    client = binding.load().Client(address)
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


def table_info(client: Any, address: str, timeout: float) -> TableInfo:
    """Asks for the table's counters.

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


def table_infos(client: Any, timeout: float) -> dict[str, TableInfo]:
    """Asks for the counters of all tables, by name."""
    infos = {}
    for message in client.ServerInfo(max(1, math.ceil(timeout))):
        fields = _parse(message)
        limiter = _parse(fields.get(5, b""))
        infos[bytes(fields[8]).decode()] = TableInfo(
            int(fields.get(7, 0)), *(_parse(limiter.get(i, b"")).get(2, 0) for i in (5, 6))
        )
    return infos


def _parse(message: bytes) -> dict[int, Any]:
    """Reads a protocol buffer's fields: bytes for messages, ints for varints; last one counts.

    The generated classes for Reverb's messages import TensorFlow.
    """
    fields: dict[int, Any] = {}
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
            fields[number] = varint()
            continue
        size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
        fields[number] = message[at : at + size]
        at += size
    return fields


def put_number(client: Any, table: str, number: float) -> None:
    """Puts a number in the place of the one in a table."""
    writer = client.NewTrajectoryWriter(binding.load().ConstantChunkerOptions(1, 1), 3000)
    refs = writer.Append([np.float64(number)])
    writer.CreateItem(table, 1.0, [[refs[0]]], [True])
    writer.Flush(0, 5000)
    writer.Close()


def get_number(client: Any, table: str) -> float:
    """Asks for the number in a table; blocks until there is one, and while the server is away."""
    sampler = client.NewSampler(table, 1, 1)
    return float(sampler.GetNextTrajectory()[4])
