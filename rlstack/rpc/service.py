"""Remote methods: how to mark them and how to answer their calls, without a transport.

A class marks its remote methods with `remote`. A `Service` answers calls for one object. The
request and the answer are bytes, read and written by `rlstack.rpc.codec`. An answer is the result,
or an error record with the type, message and traceback of the exception, or a notice that the
request was addressed to an earlier incarnation of this service.

Transports repeat calls, because a client that lost the connection cannot know whether its call ran.
An idempotent method may run again. Any other call contains the client's id and a number. The
service keeps the answer until the client acknowledges it, so that a repeated call is answered
without running again. The call is also addressed to one incarnation. So a restarted service, which
has no stored answers, never repeats a call that the previous incarnation may have run.

Calls run in threads of the transport, many at the same time. Methods that share state must use
locks. Methods may block. A method may also return a ``concurrent.futures.Future``: the caller gets
its result, and no thread of the transport waits for it.
"""

from __future__ import annotations

import collections
import functools
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlstack.checks import place_of
from rlstack.rpc import codec, versions
from rlstack.rpc.interface import REMOTE_MARK, Interface, Remote

OK, ERROR, RESTARTED = 0, 1, 2  # the first entry of an answer
HELLO = "rpc_hello"  # returns the incarnation; Courier's node hides names with a leading _
_PASSED_ON = ("run", "set_courier_server")  # Launchpad calls these in the node; never remote
_MAX_TRACEBACK = 20_000  # characters
_ANSWERS_KEPT = 600.0  # seconds after a client's last call; no call is repeated after so long
_NUMBERS_KEPT = 86_400.0  # seconds; a message that comes later is not recognised as a repetition
_MAX_CLIENTS = 100_000

# The incarnation that may run it, the client's id, the call's number, the number below which all
# calls are acknowledged, and the arguments.
Request = tuple[int, int, int, int, tuple, dict[str, Any]]


class RemoteError(RuntimeError):
    """A method raised on its node.

    Args:
      node: the node's name.
      method: the method's name.
      type_name: type of the exception on the node, such as ``"KeyError"``.
      message: the exception's type and message, as in the last line of a traceback.
      remote_traceback: text of the traceback on the node.
    """

    def __init__(
        self, node: str, method: str, type_name: str, message: str, remote_traceback: str
    ) -> None:
        super().__init__(node, method, type_name, message, remote_traceback)
        self.node, self.method, self.type_name = node, method, type_name
        self.message, self.remote_traceback = message, remote_traceback

    def __str__(self) -> str:
        return f"{self.node}.{self.method}: {self.message}\nOn the node:\n{self.remote_traceback}"


class UnavailableError(TimeoutError, ConnectionError):
    """A node did not answer in time, could not be reached, or was restarted during a call."""


class ClosedError(RuntimeError):
    """The `RemoteObject` was closed before or during the call."""


def methods_of(interface: Interface) -> dict[str, Remote]:
    """Returns the remote methods by name; for a class, the marked ones, including inherited ones.

    Raises:
      ValueError: there are no remote methods, or one has a reserved name.
    """
    if isinstance(interface, type):
        methods = {
            name: getattr(member, REMOTE_MARK)
            for cls in reversed(interface.__mro__)
            for name, member in vars(cls).items()
            if hasattr(member, REMOTE_MARK)
        }
    else:
        methods = dict(interface)
    taken = [name for name in methods if name.startswith("_") or name in (HELLO, *_PASSED_ON)]
    if not methods or taken:
        raise ValueError(
            f"remote: an interface needs public methods marked with @remote(), with names other "
            f"than {HELLO}, {', '.join(_PASSED_ON)}; {interface!r} has {sorted(methods)}."
        )
    return methods


class Service:
    """Answers calls of an object's remote methods.

    Its only public attributes are handlers from bytes to bytes, one per remote method:
    ``launchpad.CourierNode`` exposes all public attributes.
    """

    def __init__(self, instance: Any, interface: Interface | None = None) -> None:
        """Answers calls for `instance`; the default `interface` is its class."""
        self._instance = instance
        self._incarnation = 1 + secrets.randbits(62)
        self._memory = _Memory()
        methods = methods_of(type(instance) if interface is None else interface)
        self._functions = {name: getattr(instance, name) for name in methods}
        self._prompt = frozenset(name for name, rules in methods.items() if rules.prompt)
        self._handlers: dict[str, Callable[..., bytes]] = {
            name: functools.partial(self._answer, function)
            for name, function in self._functions.items()
        }
        self._handlers[HELLO] = self._hello

    def __dir__(self) -> list[str]:
        return list(self._handlers)

    def _hello(self, theirs: bytes | memoryview = b"") -> bytes:
        """Returns the incarnation to a caller of the same version, and both versions to others."""
        wrong = versions.differences(bytes(theirs), "the caller")
        return versions.REFUSED + wrong.encode() if wrong else codec.encode((OK, self._incarnation))

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_handlers", ()):
            return self._handlers[name]
        if name in _PASSED_ON:
            return getattr(self._instance, name)
        raise AttributeError(f"Service: no remote method is called {name!r}.")

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> bytes:
        """Answers a request; never raises, because Courier would send only an exception's type."""
        answer = self._begin(function, *arguments)
        return answer.result() if isinstance(answer, Future) else answer

    def _begin(self, function: Callable[..., Any], *arguments: Any) -> bytes | Future[bytes]:
        try:
            request = _request(*arguments)
        except Exception as error:
            return codec.encode(_error(error))
        return self._respond(function, request, codec.encode)

    def _respond(self, function: Callable[..., Any], request: Request, pack: Callable) -> Any:
        """Answers a request, perhaps later: the answer may be a future.

        `pack` turns the answer's record into what the transport carries.
        """
        incarnation, client, number, settled, args, kwargs = request
        try:
            if incarnation not in (0, self._incarnation):
                return pack((RESTARTED, self._incarnation))
            answer, is_new = (
                self._memory.call(client, number, settled) if number else (Future(), True)
            )
        except Exception as error:
            return pack(_error(error))
        if is_new:
            _run(answer, function, args, kwargs, pack)
        return answer.result() if answer.done() else answer


def begin(service: Service, method: str, request: Any) -> Any:
    """Returns the answer to a request, or a future of it, without waiting for a method's future.

    Args:
      service: the service that has the method.
      method: the name of the method, or `HELLO`.
      request: a message; or a `Request` of a caller in this process, whose answer is no message
        either, so that arrays are not copied. That of `HELLO` is always a message.

    Raises:
      LookupError: there is no such method.
    """
    if method == HELLO:
        return service._hello(request)
    function = service._functions[method]
    if isinstance(request, tuple):
        return service._respond(function, request, codec.share)
    return service._begin(function, request)


def prompt_methods(service: Service) -> frozenset[str]:
    """Returns the names of the methods that do not block."""
    return service._prompt


def _request(*arguments: Any) -> Request:
    if len(arguments) != 1 or not isinstance(arguments[0], bytes | memoryview):
        raise ValueError(
            "Service: a request must be one argument of bytes. Call it by an rpc.RemoteObject."
        )
    request = codec.decode(arguments[0])
    kinds = [type(part) for part in request] if isinstance(request, tuple) else []
    if kinds != [int, int, int, int, tuple, dict]:
        raise ValueError("Service: a request must be four integers, a tuple and a dict.")
    return request


def _run(
    answer: Future[Any],
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    pack: Callable,
) -> None:
    """Sets the packed answer; if the function returns a future, when that has a result."""
    try:
        result = function(*args, **kwargs)
        if isinstance(result, Future):
            result.add_done_callback(lambda done: _run(answer, done.result, (), {}, pack))
            return
        packed = pack((OK, result))
    except BaseException as error:  # also SystemExit, which would only end a thread of Courier
        packed = pack(_error(error))
    answer.set_result(packed)


def _error(error: BaseException) -> tuple:
    """Returns the record of an exception."""
    # The first frame belongs to this module.
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    place = place_of(error, users=True)
    message += f" (in {place})" if place and place not in message else ""
    texts = (type(error).__name__, message, "".join(lines)[-_MAX_TRACEBACK:])
    return (ERROR, *(t.encode(errors="backslashreplace").decode() for t in texts))


class _Client:
    """The calls of one client."""

    def __init__(self, settled: int = 0) -> None:
        self.settled = settled  # calls with lower numbers have been acknowledged
        self.calls: dict[int, Future[Any]] = {}
        self.seen = 0.0  # time of the last call


class _Memory:
    """The calls that may still be repeated, by client and number.

    A client that has made no call for long keeps only the number of its last one, so that a message
    that was delayed for hours still does not run again. New clients are refused if there are too
    many; forgetting others instead would let their calls run twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Both in the order of the last call.
        self._clients: collections.OrderedDict[int, _Client] = collections.OrderedDict()
        self._silent: collections.OrderedDict[int, tuple[int, float]] = collections.OrderedDict()

    def call(self, client_id: int, number: int, settled: int) -> tuple[Future[Any], bool]:
        """Returns a call's answer, and whether it is new. The caller must run a new call.

        Raises:
          ValueError: the client has already acknowledged the answer, or made no call for so long
            that the answer is no longer kept.
          RuntimeError: there are too many clients.
        """
        with self._lock:
            now = time.monotonic()
            client = self._clients.get(client_id) or self._admit(client_id)
            client.seen = now
            self._clients.move_to_end(client_id)
            self._forget(now)
            if number < client.settled:
                raise ValueError(f"Service: call {number} was repeated after its acknowledgement.")
            if settled > client.settled:
                client.settled = settled
                client.calls = {n: c for n, c in client.calls.items() if n >= settled}
            if number in client.calls:
                return client.calls[number], False
            new: Future[Any] = Future()
            client.calls[number] = new
            return new, True

    def _admit(self, client_id: int) -> _Client:
        """Returns the record of a client that is new, or was silent."""
        settled, _ = self._silent.pop(client_id, (0, 0.0))
        if len(self._clients) + len(self._silent) >= _MAX_CLIENTS:
            raise RuntimeError(
                f"Service: at most {_MAX_CLIENTS} clients may call within a day. Use one "
                "RemoteObject for many calls."
            )
        client = self._clients[client_id] = _Client(settled)
        return client

    def _forget(self, now: float) -> None:
        """Drops outdated answers; the oldest come first, so most calls check only one."""
        while (first := next(iter(self._clients.items())))[1].seen < now - _ANSWERS_KEPT:
            client_id, client = first
            if not all(call.done() for call in client.calls.values()):
                client.seen = now  # still running
                self._clients.move_to_end(client_id)
                continue
            del self._clients[client_id]
            last = max(client.calls, default=client.settled - 1)
            self._silent[client_id] = max(client.settled, last + 1), client.seen
        while self._silent:
            client_id, (_, seen) = next(iter(self._silent.items()))
            if seen >= now - _NUMBERS_KEPT:
                break
            del self._silent[client_id]
