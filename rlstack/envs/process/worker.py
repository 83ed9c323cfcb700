"""A worker process: it steps some environments of a process pool. It never imports JAX."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pickle
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np

from rlstack.checks import EnvCrash, EnvError, place_of
from rlstack.envs.auto_reset import AutoResetEnv, build_all, close_all, spec_signature
from rlstack.envs.process.protocol import (
    BROKEN,
    BUFFER,
    CRASHED,
    RESET,
    SHIFT,
    Hello,
    Setup,
    SharedArrays,
    pack_metrics,
    recv_message,
    send_message,
)

_ANSWER = struct.Struct("<i")  # the environment's id
_CLOSE_SECONDS = 2.0  # seconds to close environments after the parent has ended


def main(sock_fd: int, sentinel_fd: int, memory_fd: int) -> None:
    """Serves the parent until it closes the socket or ends."""
    threading.Thread(target=_watch, args=(sentinel_fd,), daemon=True).start()
    sock = socket.socket(fileno=sock_fd)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(sock, memory_fd)


def _watch(sentinel_fd: int) -> None:
    """Ends this process when the parent has ended, even in the middle of a step."""
    os.read(sentinel_fd, 1)
    time.sleep(_CLOSE_SECONDS)
    os._exit(1)


def _serve(sock: socket.socket, memory_fd: int) -> None:
    envs: dict[int, AutoResetEnv] = {}
    try:
        setup: Setup = pickle.loads(recv_message(sock))
        builder, options = pickle.loads(setup.builder)
        envs = build_all(
            builder, options, setup.seeds, setup.step_info, setup.first_index, setup.levels
        )
        head = next(iter(envs.values()))
        hello = Hello(
            *head.shown.unflatten(head.shown.leaves),
            head.action.unflatten(head.action.leaves),
            spec_signature(head),
        )
        send_message(sock, pickle.dumps((None, hello)))
        arrays = SharedArrays(memory_fd, head.shown.leaves, head.action.leaves, setup.size)
        _run(sock, envs, arrays, setup.together)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent closed the pool
    except BaseException as error:
        _send_failure(sock, error, greeted=bool(envs))
    finally:
        with contextlib.suppress(Exception):
            close_all(envs)


def _run(
    sock: socket.socket, envs: dict[int, AutoResetEnv], arrays: SharedArrays, together: bool
) -> None:
    announced = {env_id for env_id, env in envs.items() if env.announces}

    def announce(orders: list[int]) -> None:
        for order in orders:
            env_id = order >> SHIFT
            if env_id in announced:
                action = None if order & RESET else [leaf[env_id].copy() for leaf in arrays.actions]
                envs[env_id].announce(action, together)

    def step(order: int) -> bytes:
        env_id, buffer = order >> SHIFT, arrays.buffers[(order & BUFFER) // BUFFER]
        metrics = None
        if order & RESET:
            envs[env_id].reset(buffer, env_id)
        else:
            action = [leaf[env_id].copy() for leaf in arrays.actions]
            metrics = envs[env_id].step(action, buffer, env_id)
        arrays.steps_done[env_id] += 1
        answer = _ANSWER.pack(env_id)
        return answer if metrics is None else pack_metrics(env_id, metrics) + answer

    batches = _announced(sock, announce) if announced else _orders(sock)
    if announced and not together:
        _run_concurrently(sock, batches, step, list(envs.values()))
        return
    for orders in batches:
        answers = []
        for order in orders:
            answer = step(order)
            if together:
                answers.append(answer)
            else:
                sock.sendall(answer)
        if answers:
            sock.sendall(b"".join(answers))


def _run_concurrently(
    sock: socket.socket,
    batches: Iterator[list[int]],
    step: Callable[[int], bytes],
    envs: list[AutoResetEnv],
) -> None:
    """Steps each environment in its own thread, because a step may wait for a later order."""
    sending, over = threading.Lock(), threading.Event()

    def serve(order: int) -> None:
        try:
            answer = step(order)
        except BaseException as error:
            with sending, contextlib.suppress(OSError):
                if not over.is_set():  # later failures are consequences of the first
                    over.set()
                    _send_failure(sock, error, greeted=True)
        else:
            with sending, contextlib.suppress(OSError):  # the parent closed the pool
                if not over.is_set():
                    sock.sendall(answer)

    with concurrent.futures.ThreadPoolExecutor(len(envs)) as threads:
        try:
            for orders in batches:
                for order in orders:
                    threads.submit(serve, order)
        finally:
            over.set()
            for env in envs:
                env.interrupt()


def _send_failure(sock: socket.socket, error: BaseException, *, greeted: bool) -> None:
    """Reports why this worker cannot continue, instead of its ``Hello`` or after it.

    The first line of the report is the reason, the others are the traceback.
    """
    code = BROKEN if isinstance(error, EnvError) else CRASHED
    known = isinstance(error, EnvError | EnvCrash)
    text = str(error) if known else f"{type(error).__name__}: {error} (in {place_of(error)})"
    reason = " ".join(text.split())
    text = reason + "\n" + "".join(traceback.format_exception(error))
    if greeted:
        sock.sendall(struct.pack("<i", code) + text.encode())
    else:
        send_message(sock, pickle.dumps(((code, text), None)))
    sock.shutdown(socket.SHUT_WR)


def _orders(sock: socket.socket) -> Iterator[list[int]]:
    """Yields orders as they arrive, until the parent closes the socket."""
    received = bytearray()
    while part := sock.recv(1 << 16):
        received += part
        whole = len(received) // 4 * 4
        yield np.frombuffer(bytes(received[:whole]), np.int32).tolist()
        del received[:whole]


def _announced(sock: socket.socket, announce: Callable[[list[int]], None]) -> Iterator[list[int]]:
    """Yields orders like ``_orders``, after announcing each batch to its environments."""
    for orders in _orders(sock):
        announce(orders)
        yield orders
