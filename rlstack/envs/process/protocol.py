"""The messages and the shared memory between a process pool and its workers.

Each worker has one socket. First the pool sends a ``Setup``, and the worker answers with a pair of
a failure (None on success) and a ``Hello``, both as length-prefixed pickles. Then the pool sends
orders, one int32 per environment, and the worker answers each order with the environment's id once
its timestep is in shared memory. If this timestep ends an episode, or if the pool wants every info,
a message with the numbers in its info comes first. A worker that cannot continue sends a negative
code and a traceback, and exits.

The memory is an anonymous file: workers inherit its descriptor, it has no name in the file system,
and the kernel frees it when the last process that uses it ends, for any reason.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
from typing import NamedTuple

import numpy as np
from dm_env import specs

from rlstack.envs.auto_reset import SpecSignature, TimestepBuffer
from rlstack.envs.nest import Tree

# An order is `env_id << SHIFT` with these bits: whether to reset, and which buffer to write.
RESET, BUFFER, SHIFT = 1, 2, 2
# Codes of a worker that cannot continue: a new worker may succeed; a new worker would fail too.
CRASHED, BROKEN = -1, -2
# Comes before a message of `pack_metrics`.
METRICS = -3
_LENGTH = struct.Struct("<q")
_METRICS_HEAD = struct.Struct("<iii")  # METRICS, environment's id, bytes of the text
_ALIGN = 64  # bytes of a cache line, so that no two arrays share one

_ArrayKind = tuple[tuple[int, ...], str]  # shape, dtype


class Setup(NamedTuple):
    """The data that a worker needs to build its environments."""

    builder: bytes  # the pair (builder, options), pickled by cloudpickle
    seeds: dict[int, int]  # environment id -> seed
    size: int  # number of environments of the whole pool
    together: bool  # whether to answer once for all environments of a batch of orders
    step_info: bool = False  # whether to send the numbers in the info of every step
    first_index: int | None = None  # index of the first episodes, see `PoolConfig`
    levels: int = 0  # number of levels that actions choose among


class Hello(NamedTuple):
    """A worker's answer once it has built its environments."""

    observation: Tree  # specs
    extras: Tree  # specs
    action: Tree  # specs
    signature: SpecSignature


def send_message(sock: socket.socket, data: bytes) -> None:
    """Sends ``data``, prefixed with its length."""
    sock.sendall(_LENGTH.pack(len(data)) + data)


def recv_message(sock: socket.socket) -> bytes:
    """Returns what ``send_message`` sent.

    Raises:
      EOFError: the other side closed the socket.
    """
    return _recv_exactly(sock, _LENGTH.unpack(_recv_exactly(sock, _LENGTH.size))[0])


def _recv_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side closed the socket")
        data += part
    return bytes(data)


def pack_metrics(env_id: int, metrics: dict[str, float]) -> bytes:
    """Returns the message with the numbers of an episode; its length is a multiple of 4."""
    text = json.dumps(metrics).encode()
    text += b" " * (-len(text) % 4)
    return _METRICS_HEAD.pack(METRICS, env_id, len(text)) + text


def unpack_metrics(data: bytes, at: int) -> tuple[int, dict[str, float], int] | None:
    """Reads a message of `pack_metrics` at position ``at``; None if it is not complete yet.

    Returns:
      The environment's id, the numbers, and the position after the message.
    """
    start = at + _METRICS_HEAD.size
    if len(data) < start:
        return None
    _, env_id, length = _METRICS_HEAD.unpack_from(data, at)
    end = start + length
    return (env_id, json.loads(data[start:end]), end) if len(data) >= end else None


def open_memory() -> int:
    """Returns the descriptor of an empty anonymous file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlstack-envs", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedArrays:
    """The arrays of all environments of a pool, in one block of shared memory.

    Timesteps are double-buffered. A worker writes the buffer that the pool does not read, so that
    the last complete timestep is kept if the worker exits while it writes.

    Attributes:
      buffers: the two ``TimestepBuffer``s.
      actions: the action's leaves, each ``[N, ...]``.
      steps_done: ``[N]`` int64, counts finished steps; it stops when a worker hangs.
    """

    def __init__(self, fd: int, shown: list[specs.Array], acted: list[specs.Array], size: int):
        """Maps the memory ``fd`` and grows it to the size that the specs require."""
        timestep: list[_ArrayKind] = [
            ((size,), "int32"),
            ((size,), "float32"),
            ((size,), "float32"),
        ]
        timestep += [((size, *s.shape), np.dtype(s.dtype).str) for s in shown]
        kinds: list[_ArrayKind] = [*timestep, *timestep, ((size,), "int64")]
        kinds += [((size, *s.shape), np.dtype(s.dtype).str) for s in acted]
        offsets, end = [], 0
        for shape, dtype in kinds:
            offsets.append(end)
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        if os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)
        self._map = mmap.mmap(fd, end)
        arrays: list[np.ndarray] = [
            np.ndarray(shape, dtype, self._map, offset)
            for (shape, dtype), offset in zip(kinds, offsets, strict=True)
        ]
        n = len(timestep)
        self.buffers = (_buffer(arrays[:n]), _buffer(arrays[n : 2 * n]))
        self.steps_done = arrays[2 * n]
        self.actions = arrays[2 * n + 1 :]


def _buffer(arrays: list[np.ndarray]) -> TimestepBuffer:
    step_type, reward, discount, *leaves = arrays
    return TimestepBuffer(step_type, reward, discount, leaves)
