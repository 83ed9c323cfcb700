"""The methods of a `rlstack.rpc.RemoteObject`, in threads of its own."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

from rlstack.rpc.service import ClosedError

_MAX_THREADS = 16


class Threads:
    """Run calls of one remote object; they start when there is a call."""

    def __init__(self, name: str) -> None:
        """Takes the name of the node that is called."""
        self._name = name
        self._lock, self._closed = threading.Lock(), False
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[], Any]) -> concurrent.futures.Future:
        """Has a thread make the call."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name}: this RemoteObject was closed.")
            if self._executor is None:
                self._executor = concurrent.futures.ThreadPoolExecutor(
                    _MAX_THREADS, thread_name_prefix=f"rpc-{self._name}"
                )
            return self._executor.submit(call)

    def close(self) -> None:
        """Takes no more calls; what is queued runs."""
        with self._lock:
            self._closed = True
            if self._executor is not None:
                self._executor.shutdown(wait=False)


class Futures:
    """Has the methods of an object, but they return ``concurrent.futures.Future``s."""

    def __init__(self, remote: Any, threads: Threads) -> None:
        self._remote, self._threads = remote, threads

    def __getattr__(self, method: str) -> Callable[..., concurrent.futures.Future]:
        call = getattr(self._remote, method)
        return lambda *args, **kwargs: self._threads.submit(
            functools.partial(call, *args, **kwargs)
        )
