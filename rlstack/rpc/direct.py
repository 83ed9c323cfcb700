"""Calls between nodes in one process: without a socket, a message, or a copy of arrays.

Arguments and results arrive as over other transports, but arrays are read-only views of the
sender's memory. So a method must copy an array that it keeps if its caller may change it, and must
not change an array that it has returned. Dicts, lists and tuples are new on both ways.

A method runs in a thread of its server, because a caller may stop waiting for it.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlstack.rpc.addresses import ALL_ADDRESSES
from rlstack.rpc.service import Service, begin

_SPARE_THREADS = 4  # threads of a server that wait for calls, while no more are needed
_CANCELLED = ("CANCELLED", "the channel was cancelled")
_GONE = ("UNAVAILABLE", "the connection broke: the server was closed")


class Server:
    """Answers calls from this process for one object, until `close`."""

    def __init__(
        self, service: Service, port: int | None = None, bind_address: str = ALL_ADDRESSES
    ) -> None:
        """Takes a number for `port`, by which clients find it; no port is opened.

        Raises:
          OSError: another server has the number.
        """
        del bind_address
        self._service, self._methods = service, frozenset(dir(service))
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = self._free = 0
        self._later = 0  # calls that wait for the result of a future
        self._closed = False
        with _lock:
            number = str(next(_numbers) if port is None else port)
            if number in _servers:
                raise OSError(f"direct: a server of this process has the number {number} already.")
            _servers[number] = self
        self._number = number
        self.address = f"direct://localhost:{number}"

    def close(self) -> None:
        """Refuses new calls, and returns when all calls in progress have been answered."""
        with _lock:
            if _servers.get(self._number) is self:
                del _servers[self._number]
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
            self._changed.wait_for(lambda: not (self._threads or self._later))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, call: _Call) -> bool:
        """Runs a call in a thread; returns whether the server is still open."""
        with self._changed:
            if self._closed:
                return False
            if self._free:
                self._free -= 1
            else:
                self._threads += 1
                threading.Thread(target=self._run, name="direct server", daemon=True).start()
            self._calls.put(call)
        return True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._serve(call)
            del call
            with self._changed:
                if self._free >= _SPARE_THREADS or self._closed:
                    break
                self._free += 1
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()

    def _serve(self, call: _Call) -> None:
        status, answer = self._answered(call.method, call.data)
        if not isinstance(answer, Future):
            call.answer((status, answer))
            return
        with self._changed:
            self._later += 1
        answer.add_done_callback(functools.partial(self._answer_later, call))

    def _answer_later(self, call: _Call, answer: Future[tuple]) -> None:
        call.answer(("OK", answer.result()))
        with self._changed:
            self._later -= 1
            self._changed.notify_all()

    def _answered(self, method: str, data: Any) -> tuple[str, Any]:
        if method not in self._methods:
            return "NOT_FOUND", f"there is no method {method}"
        try:
            return "OK", begin(self._service, method, data)
        except BaseException as error:  # a service answers with errors; this is one of its own
            return "INTERNAL", repr(error)


class _Call:
    """A call in progress."""

    def __init__(self, method: str, data: Any) -> None:
        self.method, self.data = method, data
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.answer: Callable[[tuple[str, Any]], None] = self._answers.put

    def wait(self, seconds: float) -> tuple[str, Any]:
        try:
            return self._answers.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return "DEADLINE_EXCEEDED", "no answer before the deadline"


class Channel:
    """The calls of one client to one number."""

    in_process = True

    def __init__(self, address: str) -> None:
        """Finds the server at each call; `address` is "localhost:number"."""
        self._number = address.rpartition(":")[2]
        self._calls: set[_Call] = set()
        self._cancelled = False

    def call(self, method: str, data: Any, timeout: float) -> tuple[str, Any]:
        """Calls once; see `rlstack.rpc.transports.Channel`."""
        until = time.monotonic() + timeout
        call = _Call(method, data)
        self._calls.add(call)
        try:
            if self._cancelled:
                return _CANCELLED
            server = _servers.get(self._number)
            if server is None:
                return "UNAVAILABLE", f"no server of this process has the number {self._number}"
            if not server.begin(call):
                return _GONE
            return call.wait(until - time.monotonic())
        finally:
            self._calls.discard(call)

    def cancel(self) -> None:
        """Cancels all calls in progress and all later ones."""
        self._cancelled = True
        for call in list(self._calls):
            call.answer(_CANCELLED)


_lock = threading.Lock()
_servers: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
_numbers = itertools.count(1 << 16)  # no ports of sockets
# The threads of servers do not exist in a forked process.
os.register_at_fork(after_in_child=_servers.clear)
