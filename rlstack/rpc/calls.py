"""Calls to other nodes, over one of `rlstack.rpc.transports`.

`serve` (or a ``launchpad.CourierNode`` that constructs a `Service`) answers calls for an object; a
`RemoteObject` makes the calls. Arguments and results may be any values that `rlstack.rpc.codec`
supports. Courier alone hangs on array arguments, waits forever by default, and silently repeats a
call if its server has failed. With this module, every call has a deadline, a call that is not
idempotent runs at most once, and errors name the node, the method and the failure on the node.

Safety: these messages are not pickled; malformed bytes raise an error. With the transport
``courier``, however, Courier's own server listens without authentication and unpickles arguments
that are not plain bytes, so any program that can reach its port can run code.
`rlstack.rpc.socket_filter` restricts that server to one address. Use this transport only in
networks that you trust.

`rlstack.rpc.courier` imports Courier at the first server or call.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rlstack.rpc import addresses, codec, transports, versions
from rlstack.rpc.interface import Interface, is_client
from rlstack.rpc.service import (
    ERROR,
    HELLO,
    OK,
    RESTARTED,
    ClosedError,
    RemoteError,
    Service,
    UnavailableError,
    methods_of,
)
from rlstack.rpc.transports import Channel, Server
from rlstack.types import PyTree

_FIELDS = {OK: 2, ERROR: 4, RESTARTED: 2}  # number of fields of an answer
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5  # seconds between attempts to reach a node


def serve(
    instance: Any,
    interface: Interface | None = None,
    port: int | None = None,
    bind_address: str = addresses.ALL_ADDRESSES,
    transport: str = "",
) -> Server:
    """Starts a server that answers calls of an object's remote methods in other threads.

    Args:
      instance: the object.
      interface: the class with the marked methods, or rules by name; default: the object's class.
      port: the port to listen on; a free one by default.
      bind_address: the address of this host to listen on, in addition to loopback; default: all.
      transport: one of `rlstack.rpc.transports.TRANSPORTS`; default: this process's transport.
    """
    return transports.start_server(Service(instance, interface), port, bind_address, transport)


class RemoteObject:
    """A client of another node's object, with the object's remote methods as its own methods.

    ``remote.method(...)`` calls the method and waits for the result. Safe to use from many threads.
    A pickled copy is a new client.
    """

    def __init__(
        self,
        address: Any,
        interface: Interface,
        *,
        name: str,
        timeout: float = 10.0,
        retries: int = 3,
        likes: Mapping[str, PyTree] | None = None,
        find: Callable[[], str] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Connects at the first call.

        Args:
          address: a server's ``address``; ``"host:port"`` for the transport of this process; or a
            ``courier.Client``.
          interface: the class with the marked methods that the node serves, or rules by name.
          name: the node's name, for errors.
          timeout: seconds that a call may take, including retries and the wait for the node.
          retries: number of times that a call is sent again when the connection breaks.
          likes: method name -> an example of its answers, for ``codec.decode(like=)``.
          find: returns the node's current address, or ""; called when the node does not answer.
          stop: once it is set, calls do not wait for a node that does not answer.
        """
        self._address = f"courier://{address.address}" if is_client(address) else str(address)
        self._methods = methods_of(interface)
        if timeout <= 0 or retries < 0:
            raise ValueError(
                f"RemoteObject {name}: timeout must be positive and retries not negative; "
                f"got {timeout} and {retries}."
            )
        self._name, self._timeout, self._retries = name, timeout, retries
        self._likes, self._find = dict(likes or {}), find
        self._stop = stop or threading.Event()
        self._client_id = 1 + secrets.randbits(62)
        self._incarnation = 0  # the service's incarnation; 0 until known
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._unsettled: set[int] = set()
        self._channel: Channel | None = None
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # calls may still use old ones
        self._closed = threading.Event()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in self.__dict__.get("_methods", ()):
            raise AttributeError(f"RemoteObject: no remote method is called {method!r}.")
        return lambda *args, **kwargs: self.call(method, args, kwargs)

    def call(
        self,
        method: str,
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        patient: Callable[[bool], bool] | None = None,
    ) -> Any:
        """Calls a method and waits for its answer, for at most `timeout` seconds.

        Args:
          method: the name of the method.
          args: positional arguments.
          kwargs: keyword arguments.
          timeout: seconds to wait; None for this object's timeout.
          patient: called when the time is over or the connection broke too often, with whether the
            node answers nevertheless. If it returns True, the same call waits as long again: a call
            that still runs on the node is not run twice, and its answer is not lost.

        Raises:
          RemoteError: the method raised on its node.
          UnavailableError: no answer arrived in time; or the node failed, and may have run a call
              that is not idempotent. After a deadline the call may still be running on the node.
          ClosedError: this object was closed.
          ValueError: an argument cannot be sent, or the answer does not fit its example.
        """
        call = _Call(self, method, self._timeout if timeout is None else timeout, patient)
        body = (args, dict(kwargs or {}))
        if self._methods[method].idempotent:
            return call.run((0, 0, 0), body)
        with self._lock:
            number = next(self._numbers)
            self._unsettled.add(number)
            settled = min(self._unsettled)
        try:
            return call.run((self._client_id, number, settled), body)
        finally:
            with self._lock:
                self._unsettled.discard(number)

    def close(self) -> None:
        """Makes the calls of all threads, and later calls, raise `ClosedError`."""
        with self._lock:
            self._closed.set()
            channels = list(self._channels)
        for channel in channels:
            channel.cancel()

    @property
    def host(self) -> str:
        """The host of the node's address."""
        return addresses.split(self._address.rpartition("://")[2])[0]

    def _open_channel(self) -> Channel:
        channel = self._channel
        if channel is None or self._closed.is_set():
            with self._lock:
                if self._closed.is_set():
                    raise ClosedError(f"{self._name}: this RemoteObject was closed.")
                channel = self._channel
                if channel is None:
                    channel = self._channel = transports.open_channel(self._address)
                    self._channels.add(channel)
        return channel

    def _drop_channel(self, channel: Channel) -> None:
        """Makes later calls connect again, perhaps to another address.

        The old channel would wait for increasing times between its attempts to reconnect.
        """
        if self._find is not None:
            with contextlib.suppress(UnavailableError, RemoteError):
                self._address = self._find() or self._address
        with self._lock:
            if self._channel is channel:
                self._channel = None

    def __enter__(self) -> RemoteObject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        options: dict[str, Any] = {"timeout": self._timeout, "retries": self._retries}
        options |= {"likes": self._likes, "find": self._find}
        make = functools.partial(RemoteObject, name=self._name, **options)
        return make, (self._address, self._methods)


class _Call:
    """One call, with its deadline and its retries."""

    def __init__(
        self,
        remote: RemoteObject,
        method: str,
        timeout: float,
        patient: Callable[[bool], bool] | None,
    ) -> None:
        self._remote, self._method = remote, method
        self._began = time.monotonic()
        self._timeout, self._patient = timeout, patient
        self._incarnation: int | None = None  # the one that may run the call; 0: any, None: unknown
        self._may_have_run = self._restarted = self._in_process = False

    def run(self, identity: tuple[int, int, int], body: tuple[tuple, dict[str, Any]]) -> Any:
        """Calls until there is an answer; `identity` is (0, 0, 0) for an idempotent call."""
        while True:
            try:
                return self._try(identity, body)
            except UnavailableError:
                if not self._waits_again():
                    raise

    def _waits_again(self) -> bool:
        """Asks the caller whether to wait again; then sets a new deadline."""
        if self._patient is None or self._restarted:
            return False
        self._began = time.monotonic()
        answers = False
        with contextlib.suppress(UnavailableError):
            answers = self._hello() > 0
        self._began = time.monotonic()
        return self._patient(answers)

    def _try(self, identity: tuple[int, int, int], body: tuple[tuple, dict[str, Any]]) -> Any:
        """Calls until there is an answer or the deadline has passed."""
        once, breaks = identity[0] != 0, 0
        if self._incarnation is None:
            known = self._remote._incarnation or self._hello()
            self._incarnation = known if once else 0
        while True:
            code, answer = self._send(self._method, (self._incarnation, *identity, *body))
            if code == "OK":
                kind, value, *_ = self._read(answer)
                if kind == OK:
                    return self._result(value)
                if self._may_have_run:
                    raise self._was_restarted()
                # The node refused the call, because it was addressed to an earlier incarnation: it
                # has not run.
                self._incarnation = self._remote._incarnation = value
                continue
            breaks += 1
            self._may_have_run = True
            if breaks > self._remote._retries:
                raise self._unavailable(f"the connection broke {breaks} times: {answer}")
            if self._hello() != self._incarnation and once:
                raise self._was_restarted()

    def _hello(self) -> int:
        """Waits until the node answers, and returns its incarnation."""
        remote, pause = self._remote, _FIRST_PAUSE
        while True:
            code, answer = self._send(HELLO, versions.own())
            if code == "OK":
                if isinstance(answer, bytes) and answer.startswith(versions.REFUSED):
                    text = answer.removeprefix(versions.REFUSED).decode(errors="replace")
                    raise RemoteError(remote._name, self._method, "VersionError", text, "")
                remote._incarnation = self._read(answer)[1]
                return remote._incarnation
            if self._seconds_left() <= pause or remote._stop.is_set():
                raise self._unavailable(f"it could not be reached: {answer}")
            remote._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _send(self, method: str, data: bytes | tuple) -> tuple[str, Any]:
        """Sends bytes, or the record of a call.

        Returns ("OK", answer) or ("UNAVAILABLE", message), and raises all other failures.
        """
        remote = self._remote
        seconds = self._seconds_left()
        if seconds <= 0:
            raise self._unavailable("the deadline has passed")
        channel = remote._open_channel()
        if isinstance(data, tuple):
            data = codec.share(data) if channel.in_process else codec.encode(data)
        code, answer = channel.call(method, data, seconds)
        self._in_process = channel.in_process
        if remote._closed.is_set() and code != "OK":
            raise ClosedError(f"{remote._name}.{self._method}: this RemoteObject was closed.")
        if code == "DEADLINE_EXCEEDED":
            if remote._find is not None:  # there is no other sign of an unreachable host
                remote._drop_channel(channel)
            self._may_have_run |= method != HELLO
            late = "it could not be reached" if method == HELLO else "it may still run there"
            raise self._unavailable(f"the deadline has passed; {late}")
        if code == "UNAVAILABLE":
            remote._drop_channel(channel)
        elif code != "OK":
            raise RemoteError(remote._name, self._method, code, f"{code}: {answer}", "")
        return code, answer

    def _read(self, answer: Any) -> tuple:
        """Returns the record of an answer, or raises the error that the node reports."""
        try:
            if self._in_process and isinstance(answer, tuple):
                record = answer
            elif isinstance(answer, bytes | memoryview):
                record = codec.decode(answer)
            else:
                raise ValueError(f"it must be bytes; got {type(answer).__name__}.")
            if record[0] not in (OK, ERROR, RESTARTED) or len(record) != _FIELDS[record[0]]:
                raise ValueError(f"it begins with {record[0]!r}.")
        except (ValueError, TypeError, LookupError) as error:
            record = (
                ERROR,
                "ValueError",
                f"the answer is not from an rlstack service: {error}",
                "",
            )
        if record[0] == ERROR:
            raise RemoteError(self._remote._name, self._method, *record[1:])
        return record

    def _result(self, value: Any) -> Any:
        like = self._remote._likes.get(self._method)
        if like is None:
            return value
        return codec.conform(value, like, f"{self._remote._name}.{self._method}")

    def _seconds_left(self) -> float:
        return self._began + self._timeout - time.monotonic()

    def _was_restarted(self) -> UnavailableError:
        self._restarted = True
        return self._unavailable("the node was restarted and may have run it")

    def _unavailable(self, reason: str) -> UnavailableError:
        waited = time.monotonic() - self._began
        return UnavailableError(
            f"{self._remote._name}.{self._method}: no answer from {self._remote._address}: "
            f"{reason}; waited {waited:.1f} of {self._timeout:g} s. Check that the node runs."
        )
