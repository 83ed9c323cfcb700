"""The process that runs some environments of a process pool. It never imports JAX.

Protocol, on one socket. First the parent sends the builder and the worker answers with the specs
(both length-prefixed pickles). Then the parent sends orders, one int32 for each environment, and
the worker answers each with the environment's id when its row is written to shared memory. A
worker that cannot go on says so with a negative number and a traceback, and exits.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

RESET, BANK, SHIFT = 1, 2, 2  # an order is env_id << SHIFT, with these bits
CRASHED, BROKEN = -1, -2  # the answers that mean: restart me; do not restart me
_LENGTH = struct.Struct("<q")
_GRACE = 2.0  # seconds to close environments in when the parent has died


class Setup(NamedTuple):
    """What a worker needs to know."""

    builder: bytes  # the pair (builder, options), by cloudpickle
    seeds: dict[int, int]  # by env id
    size: int  # of the whole pool
    together: bool  # whether to answer once for all environments of an order


class Hello(NamedTuple):
    """What a worker that has built its environments answers."""

    observation: Any  # specs
    action: Any  # specs
    layout: list[tuple]


def send_message(sock: socket.socket, data: bytes) -> None:
    """Sends ``data`` with its length before it."""
    sock.sendall(_LENGTH.pack(len(data)) + data)


def recv_message(sock: socket.socket) -> bytes:
    """Returns what ``send_message`` sent.

    Raises:
      EOFError: the other side is gone.
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


def main(sock_fd: int, sentinel_fd: int, block_fd: int) -> None:
    """Serves the parent until it closes the socket or dies."""
    # Ctrl-C goes to every process of the terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(sentinel_fd,), daemon=True).start()
    sock = socket.socket(fileno=sock_fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(sock, block_fd)


def _watch(sentinel_fd: int) -> None:
    """Ends this process when the parent is gone, also in the middle of a step."""
    os.read(sentinel_fd, 1)
    time.sleep(_GRACE)
    os._exit(1)


def _serve(sock: socket.socket, block_fd: int) -> None:
    from rlstack.envs.episode import build, close_all, layout
    from rlstack.envs.shared import Table

    episodes: dict = {}
    try:
        setup: Setup = pickle.loads(recv_message(sock))
        builder, options = pickle.loads(setup.builder)
        episodes = build(builder, options, setup.seeds)
        head = next(iter(episodes.values()))
        hello = Hello(
            head.observed.unflatten(head.observed.leaves),
            head.acted.unflatten(head.acted.leaves),
            layout(head),
        )
        send_message(sock, pickle.dumps((None, hello)))
        table = Table(block_fd, head.observed.leaves, head.acted.leaves, setup.size)
        _run(sock, episodes, table, setup.together)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent closed the pool
    except BaseException as error:
        _tell(sock, error, greeted=bool(episodes))
    finally:
        with contextlib.suppress(Exception):
            close_all(episodes)


def _run(sock: socket.socket, episodes: dict, table: Any, together: bool) -> None:
    told = {env_id for env_id, episode in episodes.items() if episode.announces}

    def announce(listed: list[int]) -> None:
        for order in listed:
            env_id = order >> SHIFT
            if env_id in told:
                action = None if order & RESET else [leaf[env_id].copy() for leaf in table.actions]
                episodes[env_id].announce(action, together)

    def step(order: int) -> int:
        env_id, bank = order >> SHIFT, table.banks[(order & BANK) // BANK]
        if order & RESET:
            episodes[env_id].reset(bank, env_id)
        else:
            action = [leaf[env_id].copy() for leaf in table.actions]
            episodes[env_id].step(action, bank, env_id)
        table.beats[env_id] += 1
        return env_id

    batches = _announced(sock, announce) if told else _orders(sock)
    if told and not together:
        _run_at_once(sock, batches, step, list(episodes.values()))
        return
    for listed in batches:
        done = []
        for order in listed:
            env_id = step(order)
            if together:
                done.append(env_id)
            else:
                sock.sendall(struct.pack("<i", env_id))
        if done:
            sock.sendall(struct.pack(f"<{len(done)}i", *done))


def _run_at_once(
    sock: socket.socket,
    batches: Iterator[list[int]],
    step: Callable[[int], int],
    episodes: list[Any],
) -> None:
    """Steps each environment in a thread of its own: a step may wait for what others are sent."""
    sending, over = threading.Lock(), threading.Event()

    def serve(order: int) -> None:
        try:
            env_id = step(order)
        except BaseException as error:
            with sending, contextlib.suppress(OSError):
                if not over.is_set():  # the failures after the first are of its making
                    over.set()
                    _tell(sock, error, greeted=True)
        else:
            with sending, contextlib.suppress(OSError):  # the parent closed the pool
                if not over.is_set():
                    sock.sendall(struct.pack("<i", env_id))

    with concurrent.futures.ThreadPoolExecutor(len(episodes)) as threads:
        try:
            for listed in batches:
                for order in listed:
                    threads.submit(serve, order)
        finally:
            over.set()
            for episode in episodes:
                episode.interrupt()


def _tell(sock: socket.socket, error: BaseException, *, greeted: bool) -> None:
    """Says why this worker cannot go on, in place of its greeting or after it."""
    from rlstack.envs.adapters import EnvError

    code = BROKEN if isinstance(error, EnvError) else CRASHED
    text = "".join(traceback.format_exception(error))
    if greeted:
        sock.sendall(struct.pack("<i", code) + text.encode())
    else:
        send_message(sock, pickle.dumps(((code, text), None)))
    sock.shutdown(socket.SHUT_WR)


def _orders(sock: socket.socket) -> Iterator[list[int]]:
    """Yields orders as they come, until the parent closes the socket."""
    orders = bytearray()
    while part := sock.recv(1 << 16):
        orders += part
        whole = len(orders) // 4 * 4
        yield np.frombuffer(bytes(orders[:whole]), np.int32).tolist()
        del orders[:whole]


def _announced(sock: socket.socket, announce: Callable[[list[int]], None]) -> Iterator[list[int]]:
    """Yields the same, told to the environments before any of them steps."""
    for listed in _orders(sock):
        announce(listed)
        yield listed
