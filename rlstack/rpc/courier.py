"""Sends and receives bytes by Courier. No other file of rlstack imports Courier.

Courier is imported when it is first needed. Calls use its asynchronous client: with the synchronous
client, a thread can neither be stopped nor handle signals before the deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import queue
import threading
import weakref
from typing import Any

from rlstack.rpc.addresses import ALL_ADDRESSES
from rlstack.rpc.service import Service
from rlstack.rpc.socket_filter import restrict_listeners

_GRACE = 2.0  # seconds after its deadline when a call is abandoned


class Server:
    """A Courier server that answers calls for one object until `close`."""

    def __init__(
        self, service: Service, port: int | None = None, bind_address: str = ALL_ADDRESSES
    ) -> None:
        """Listens on `port`, or on a free one, at an address of this host."""
        self._server = _courier()[0].Server(port=port)
        for name in dir(service):
            self._server.Bind(name, getattr(service, name))
        self._server.Start()
        self._closed = False
        self.address = f"courier://{self._server.address}"
        try:
            restrict_listeners(int(self.address.rsplit(":", 1)[1]), bind_address)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Refuses new calls, and returns when all calls in progress have been answered."""
        if not self._closed:
            self._closed = True
            self._server.Stop()
            self._server.Join()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Channel:
    """A connection to one address, and its calls in progress."""

    in_process = False

    def __init__(self, address: str) -> None:
        """Connects at the first call."""
        _free_retired()
        self._client = _courier()[1].PyClient(address)
        self._cancelled = False
        self._cancellers: set[Any] = set()
        # Weak references to the callbacks that Courier holds. While any of them exist, the client
        # must not be freed, because freeing waits for Courier's thread, which waits for the GIL.
        self._callbacks: set[weakref.ref] = set()

    def call(self, method: str, data: bytes, timeout: float) -> tuple[str, Any]:
        """Calls once, without waiting for a node that does not listen.

        Args:
          method: name of the method.
          data: the only argument of the method.
          timeout: seconds until the call is abandoned.

        Returns:
          ``("OK", answer)``, or the gRPC status and its message: UNAVAILABLE when there is no
          connection or it broke, DEADLINE_EXCEEDED, CANCELLED after `cancel`.
        """
        answers: queue.SimpleQueue = queue.SimpleQueue()
        callback = functools.partial(answers.put)  # Courier does not accept a builtin method
        self._callbacks.add(weakref.ref(callback, self._callbacks.discard))
        wait_for_ready = compress = chunk_tensors = False
        canceller = self._client.AsyncPyCall(
            method,
            [data],
            {},
            callback,
            callback,
            wait_for_ready,
            datetime.timedelta(seconds=max(timeout, 0.001)),  # 0 would mean no deadline
            compress,
            chunk_tensors,
        )
        del callback
        self._cancellers.add(canceller)
        try:
            if self._cancelled:
                canceller.Cancel()
            answer = answers.get(timeout=timeout + _GRACE)
        except queue.Empty:
            canceller.Cancel()
            return "DEADLINE_EXCEEDED", "abandoned after the deadline"
        except BaseException:
            canceller.Cancel()
            raise
        finally:
            self._cancellers.discard(canceller)
        return ("OK", answer) if not hasattr(answer, "code") else (_name(answer), answer.message())

    def cancel(self) -> None:
        """Cancels all calls in progress and all later ones."""
        self._cancelled = True
        for canceller in list(self._cancellers):
            canceller.Cancel()

    def is_idle(self) -> bool:
        """Whether Courier does not hold any callback."""
        return not self._callbacks

    def __del__(self) -> None:
        # Garbage collection may run in any thread, even in the client's own thread. That thread
        # cannot wait for itself, so the process would abort. So the next channel that is opened
        # frees the client. At the end of the process there is none, and no list either.
        if hasattr(self, "_client") and _retired is not None:
            _retired.append(self)


def replace_handlers(server: Any, instance: object, service: Service) -> None:
    """Replaces the handlers of the public methods of `instance` by those of `service`.

    Args:
      server: the ``courier.Server`` that Launchpad has made for the instance and not started yet.
      instance: the object of a node.
      service: the service that answers instead.
    """
    for name in dir(instance):
        is_public = not name.startswith("_") or name == "__call__"
        if is_public and name != "set_courier_server" and callable(getattr(instance, name)):
            server.Unbind(name)
    for name in dir(service):
        server.Bind(name, getattr(service, name))


def program_stop_event() -> threading.Event:
    """Returns the event that Launchpad sets when the program of this node stops."""
    import launchpad

    return launchpad.stop_event()


_retired: list[Channel] = []  # unused channels to free


def _free_retired() -> None:
    for channel in list(_retired):
        if channel.is_idle():
            with contextlib.suppress(ValueError):  # another thread has removed it
                _retired.remove(channel)


def _name(status: Any) -> str:
    return status.code().name


def _courier() -> tuple[Any, Any]:
    """Returns Courier and the binding of its client."""
    try:
        import courier
        from courier.python import py_client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "rpc: calls between nodes need Courier, which comes with dm-launchpad (CPython 3.10 "
            "only). Use the single_process topology elsewhere."
        ) from error
    return courier, py_client
