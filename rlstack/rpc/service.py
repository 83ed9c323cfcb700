"""What may be called from afar, and how a call is answered; no transport here (`rlstack.rpc`).

A class marks its remote methods with `remote`. A `Service` answers for one object: each call is
bytes in, bytes out, read and written by `rlstack.rpc.codec`. An answer is the result, or an error
record with the type, message and traceback of what was raised, or the news that the request was
meant for an earlier incarnation of this service.

Transports repeat calls: a client that lost the connection cannot know whether its call ran. A
method declared idempotent may simply run again. Any other call carries the client's id and a
number, and the service keeps its answer until the client says that it has it, so a repeated call
is answered, not run. The call is also addressed to one incarnation, so that a service started
afresh, which remembers nothing, never runs what its predecessor may have run.

Every call is answered in a thread of its own, as many at once as there are callers, and there is
no limit: methods that share state must lock, and may block.
"""

from __future__ import annotations

import collections
import functools
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rlstack.rpc import codec

OK, ERROR, RESTARTED = 0, 1, 2  # how an answer begins
HELLO = "rpc_hello"  # answers with the incarnation; Courier's node hides names with a leading _
_MARK = "_remote_method"
_PASSED_ON = ("run", "set_courier_server")  # what Launchpad asks a node for, never remote
_MAX_TRACEBACK = 20_000  # characters
_MAX_CLIENTS = 1024

Function = TypeVar("Function", bound=Callable[..., Any])


class Remote(NamedTuple):
    """What callers of a remote method need to know."""

    idempotent: bool = False  # running it twice is as good as running it once


Interface = Mapping[str, Remote] | type


class RemoteError(RuntimeError):
    """A method raised on its node.

    Args:
      node: the node's name.
      method: the method's.
      type_name: of what was raised there, such as ``"KeyError"``.
      message: its type and message in one, as tracebacks end.
      remote_traceback: the text of the traceback there.
    """

    def __init__(
        self, node: str, method: str, type_name: str, message: str, remote_traceback: str
    ) -> None:
        super().__init__(node, method, type_name, message, remote_traceback)
        self.node, self.method, self.type_name = node, method, type_name
        self.message, self.remote_traceback = message, remote_traceback

    def __str__(self) -> str:
        return f"{self.node}.{self.method}: {self.message}\nThere:\n{self.remote_traceback}"


class UnavailableError(TimeoutError, ConnectionError):
    """A node did not answer in time, could not be reached, or was restarted during a call."""


class ClosedError(RuntimeError):
    """The `RemoteObject` was closed, before the call or while it waited."""


def remote(*, idempotent: bool = False) -> Callable[[Function], Function]:
    """Marks a method as one to be called from afar.

    Args:
      idempotent: whether running it twice is as good as once; then nothing is kept of its answers.
    """

    def mark(function: Function) -> Function:
        setattr(function, _MARK, Remote(idempotent))
        return function

    return mark


def methods_of(interface: Interface) -> dict[str, Remote]:
    """Returns the remote methods by name: of a class those marked, itself or in a base.

    Raises:
      ValueError: there are none, or one has a name that is taken.
    """
    if isinstance(interface, type):
        methods = {
            name: getattr(member, _MARK)
            for cls in reversed(interface.__mro__)
            for name, member in vars(cls).items()
            if hasattr(member, _MARK)
        }
    else:
        methods = dict(interface)
    taken = [name for name in methods if name.startswith("_") or name in (HELLO, *_PASSED_ON)]
    if not methods or taken:
        raise ValueError(
            f"remote: an interface needs public methods marked with @remote(), called neither "
            f"{HELLO} nor {' nor '.join(_PASSED_ON)}; {interface!r} has {sorted(methods)}."
        )
    return methods


class Service:
    """Answers calls of an object's remote methods.

    Its only visible attributes are handlers that take and return bytes, one a remote method, so
    that ``launchpad.CourierNode``, which exposes all it sees, exposes these alone.
    """

    def __init__(self, instance: Any, interface: Interface | None = None) -> None:
        """Serves `instance`; `interface` is its own class unless given."""
        self._instance = instance
        self._incarnation = 1 + secrets.randbits(62)
        self._memory = _Memory()
        methods = methods_of(type(instance) if interface is None else interface)
        self._handlers: dict[str, Callable[..., bytes]] = {
            name: functools.partial(self._answer, getattr(instance, name)) for name in methods
        }
        self._handlers[HELLO] = lambda *_: codec.encode((OK, self._incarnation))

    def __dir__(self) -> list[str]:
        return list(self._handlers)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_handlers", ()):
            return self._handlers[name]
        if name in _PASSED_ON:
            return getattr(self._instance, name)
        raise AttributeError(f"Service: no remote method is called {name!r}.")

    def _answer(self, function: Callable[..., Any], *arguments: Any) -> bytes:
        """Never raises, whatever comes: Courier would leave the caller to read its stderr."""
        try:
            incarnation, client, number, settled, args, kwargs = _request(*arguments)
            if incarnation not in (0, self._incarnation):
                return codec.encode((RESTARTED, self._incarnation))
            if number == 0:
                return _run(function, args, kwargs)
            call, is_new = self._memory.call(client, number, settled)
        except Exception as error:
            return _error(error)
        if is_new:
            call.answer = _run(function, args, kwargs)
            call.done.set()
        call.done.wait()
        return call.answer


def _request(*arguments: Any) -> tuple[int, int, int, int, tuple, dict[str, Any]]:
    if len(arguments) != 1 or not isinstance(arguments[0], bytes):
        raise ValueError(
            "Service: a request is one bytes argument. Call it by an rpc.RemoteObject."
        )
    request = codec.decode(arguments[0])
    kinds = [type(part) for part in request] if isinstance(request, tuple) else []
    if kinds != [int, int, int, int, tuple, dict]:
        raise ValueError("Service: a request is four integers, a tuple and a dict.")
    return request


def _run(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    try:
        return codec.encode((OK, function(*args, **kwargs)))
    except BaseException as error:  # SystemExit too: it would end a thread of Courier's, no process
        return _error(error)


def _error(error: BaseException) -> bytes:
    # The first frame is this module's own.
    frames = error.__traceback__ and error.__traceback__.tb_next
    lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
    message = "".join(traceback.format_exception_only(type(error), error)).strip()
    texts = (type(error).__name__, message, "".join(lines)[-_MAX_TRACEBACK:])
    return codec.encode((ERROR, *(t.encode(errors="backslashreplace").decode() for t in texts)))


class _Call:
    """A call that is not to run twice."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.answer = b""


class _Client:
    """What is remembered of a client."""

    def __init__(self) -> None:
        self.settled = 0  # calls of lower numbers have been answered for good
        self.calls: dict[int, _Call] = {}


class _Memory:
    """The calls that may still be repeated, by client and number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: collections.OrderedDict[int, _Client] = collections.OrderedDict()

    def call(self, client_id: int, number: int, settled: int) -> tuple[_Call, bool]:
        """Returns a call, and whether it is new and so to be run by the asker.

        Raises:
          ValueError: the client has said before that it has the answer.
        """
        with self._lock:
            client = self._clients.setdefault(client_id, _Client())
            self._clients.move_to_end(client_id)
            if number < client.settled:
                raise ValueError(f"Service: call {number} came again after it had been settled.")
            if settled > client.settled:
                client.settled = settled
                client.calls = {n: c for n, c in client.calls.items() if n >= settled}
            while len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            if number in client.calls:
                return client.calls[number], False
            client.calls[number] = call = _Call()
            return call, True
