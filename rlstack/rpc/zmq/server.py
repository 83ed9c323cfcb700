"""The server's end of calls over ZeroMQ.

All threads of a server wait for requests, and the kernel wakes one of them for each. That thread
receives the request, runs the method, and sends the answer by itself. So a call wakes no other
thread, and methods may block. If a method returns a future, the thread that sets its result sends
the answer. The sockets are used under a lock.

With prompt methods (`rlstack.rpc.remote`) only one thread waits. The requests of several clients
come while it is busy, and a second thread that wakes for them would only contend with it for the
interpreter. Another thread stands by, and takes over if a method takes long after all.

A client is admitted if it has the secret key of the program's clients. ZeroMQ asks for that
decision over a socket inside the process (ZAP, RFC 27).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import select
import socket
import threading
import weakref
from concurrent.futures import Future

import zmq
from zmq.utils import z85

from rlstack.rpc import addresses
from rlstack.rpc.service import HELLO, Service, begin, prompt_methods
from rlstack.rpc.zmq import keys, options

_ZAP, _DOMAIN = "inproc://zeromq.zap.01", b"rlstack"
_MOST_THREADS = 512  # calls that run at once; more wait
_SPARE_THREADS = 16  # threads that wait for requests, while no more are needed
_TAKES_LONG = 0.02  # seconds without a waiting thread after which the one that stands by takes over
_AT_EXIT = 0.2  # seconds that calls in progress may take when the process ends
_LAST_ANSWERS = 1000  # milliseconds that `close` takes at most to send them


class Server:
    """A server that answers calls for one object until `close`."""

    def __init__(
        self, service: Service, port: int | None = None, bind_address: str = addresses.ALL_ADDRESSES
    ) -> None:
        """Listens on `port`, or on a free one, at loopback and at an address of this host.

        Raises:
          OSError: the port is taken, or this host has no such address.
        """
        own = keys.current()
        self._admitted = z85.decode(own.client_public)
        self._service = service
        self._methods = {name.encode(): name for name in dir(service)}
        prompt = prompt_methods(service)
        self._prompt = {name.encode() for name in (*prompt, HELLO)}
        self._spare = 1 if prompt else _SPARE_THREADS
        self._context = zmq.Context()
        # First, because without it everyone would be admitted.
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._router = self._context.socket(zmq.ROUTER)
        options.set_options(self._router)
        self._router.curve_server = True
        self._router.curve_publickey, self._router.curve_secretkey = (
            own.server_public,
            own.server_secret,
        )
        self._router.zap_domain = _DOMAIN
        self._pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sockets = threading.Lock()  # held by whoever uses a socket
        lock = threading.Lock()
        self._count = threading.Condition(lock)  # signals changes of the counts below
        self._call = threading.Condition(lock)  # calls the thread that stands by
        self._threads = self._waiting = self._received = 0
        self._stands_by = self._called = False  # whether a thread does, and is to take over
        self._later = 0  # calls that wait for the result of a future
        self._closing = self._closed = False
        try:
            self.address = f"zmq://localhost:{self._bind(port, bind_address)}"
        except zmq.ZMQError as error:
            self._free()
            raise OSError(
                error.errno,
                f"zmq: this host must let a server listen on {bind_address}, port "
                f"{port or 'any'}; it answers {error.strerror}",
            ) from error
        self._watched = (self._router.FD, self._zap.FD, self._wake)
        _open.add(self)
        self._add_thread()

    def close(self) -> None:
        """Refuses new calls, and returns when all calls in progress have been answered."""
        self.end(None, _LAST_ANSWERS)

    def end(self, seconds: float | None, linger: int) -> None:
        """Closes the server.

        Args:
          seconds: the longest time in seconds to wait for calls in progress; None for no limit.
          linger: the longest time in milliseconds to wait until clients have received their
            answers.
        """
        if self._pid != os.getpid():  # it belongs to the parent
            return
        with self._count:
            if self._closing:
                return
            self._closing = True
        self._wake_one()  # which wakes the next one when it ends
        with self._count:
            self._call.notify()
            self._count.wait_for(lambda: not (self._threads or self._later), seconds)
        self._free(linger)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self, port: int | None, bind_address: str) -> int:
        """Listens at loopback and the address; returns the port."""
        places = [bind_address]
        if not (addresses.is_all(bind_address) or bind_address.startswith("127.")):
            places = [addresses.LOOPBACK, bind_address]
        number = str(port or "*")
        for place in places:
            is_ipv6 = addresses.family(place) == socket.AF_INET6
            self._router.setsockopt(zmq.IPV6, int(is_ipv6))  # for the sockets from here on
            self._router.bind(f"tcp://{addresses.join(place, number)}")
            number = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        return int(number)

    def _free(self, linger: int = 0) -> None:
        """Closes the sockets; no thread uses them any more."""
        with self._sockets:
            if self._closed:
                return
            self._closed = True
            _open.discard(self)
            self._router.close(linger)
            self._zap.close(0)
        self._context.term()
        if not self._threads:  # those that are left, at the process's end, may still write to it
            os.close(self._wake)

    def _add_thread(self) -> None:
        with self._count:
            self._threads += 1
        threading.Thread(target=self._run, name="zmq server", daemon=True).start()

    def _run(self) -> None:
        """Receives requests and answers them, until enough other threads wait."""
        try:
            with select.epoll() as events:
                for descriptor in self._watched:
                    events.register(descriptor, select.EPOLLIN | select.EPOLLEXCLUSIVE)
                while self._serve(events):
                    pass
        finally:
            with self._count:
                if self._closing:
                    self._wake_one()
                self._threads -= 1
                self._count.notify_all()

    def _serve(self, events: select.epoll) -> bool:
        """Waits for one request and answers it; returns False if this thread is to end."""
        with self._count:
            if self._waiting >= self._spare:
                self._wake_one()  # there may be a request that no other thread was told of
                if self._stands_by or self._spare > 1:
                    return False
                self._stand_by()
            self._waiting += 1
        request = None
        try:
            request = self._receive(events)
        finally:
            with self._count:
                self._waiting -= 1
                self._received += 1
        if request is None:
            return False
        self._replace(self._is_prompt(request))
        self._respond(*request)
        return True

    def _replace(self, is_prompt: bool) -> None:
        """Makes sure that another thread waits for requests, at once or after a while."""
        with self._count:
            if self._waiting or (is_prompt and self._stands_by):
                return
            if self._stands_by:
                self._called = True
                self._call.notify()
                return
            full = self._threads >= _MOST_THREADS
        if not full:
            self._add_thread()

    def _stand_by(self) -> None:
        """Waits, holding the count, until this thread is called or none has waited for a while."""
        self._stands_by, seen = True, -1
        while not (self._called or self._closing) and (self._waiting or self._received != seen):
            seen = self._received
            self._call.wait(_TAKES_LONG)
        self._stands_by = self._called = False

    def _receive(self, events: select.epoll) -> list[zmq.Frame] | None:
        """Waits for a request; returns None when the server closes."""
        while True:
            with self._sockets:
                if self._closing:
                    return None
                self._admit()
                if options.has_message(self._router):
                    request = options.receive(self._router)
                    if not self._is_prompt(request):
                        self._wake_for_the_next()  # else this thread will soon receive it
                    return request
            # The descriptors of sockets become readable when something has changed; what was seen
            # above counts as old.
            if any(descriptor == self._wake for descriptor, _ in events.poll()):
                with contextlib.suppress(BlockingIOError):  # another thread was faster
                    os.eventfd_read(self._wake)

    def _is_prompt(self, request: list[zmq.Frame]) -> bool:
        return len(request) > 1 and request[1].bytes in self._prompt

    def _wake_for_the_next(self) -> None:
        """Wakes a thread if there is a request; the caller holds the sockets.

        Using a socket takes note of requests that have arrived; its descriptor then stays silent.
        A thread looks for requests before it waits, so if none waits now, none is to be woken.
        """
        if self._waiting and options.has_message(self._router):
            self._wake_one()

    def _wake_one(self) -> None:
        """Wakes one of the threads that wait."""
        with contextlib.suppress(OSError):  # awake already, or closed at the process's end
            os.eventfd_write(self._wake, 1)

    def _admit(self) -> None:
        """Answers ZeroMQ's questions whether to admit a client, from its public key."""
        while options.has_message(self._zap):
            version, number, _, _, _, mechanism, *keys = self._zap.recv_multipart(zmq.NOBLOCK)
            known = len(keys) == 1 and secrets.compare_digest(keys[0], self._admitted)
            result = (b"200", b"OK") if known and mechanism == b"CURVE" else (b"400", b"unknown")
            self._zap.send_multipart([version, number, *result, b"", b""])

    def _respond(self, client: zmq.Frame, *frames: zmq.Frame) -> None:
        """Runs a method, and sends its answer: now, or from the thread that sets its future."""
        status, answer = self._answer(*frames)
        if not isinstance(answer, Future):
            self._send(client, status, answer)
            return
        with self._count:
            self._later += 1
        answer.add_done_callback(functools.partial(self._send_later, client))

    def _send_later(self, client: zmq.Frame, answer: Future[bytes]) -> None:
        self._send(client, options.OK, answer.result())
        with self._count:
            self._later -= 1
            self._count.notify_all()

    def _answer(self, *frames: zmq.Frame) -> tuple[bytes, bytes | Future[bytes]]:
        """Runs a method; returns the status and the answer."""
        if len(frames) != 2:
            return options.FAILED, b"a request must have a method and an argument"
        name = frames[0].bytes
        method = self._methods.get(name)
        if method is None:
            return options.NOT_FOUND, b"there is no method " + name[:200]
        try:
            return options.OK, begin(self._service, method, options.bytes_of(frames[1]))
        except BaseException as error:  # a service answers with errors; this is one of its own
            return options.FAILED, repr(error)[:1000].encode(errors="backslashreplace")

    def _send(self, client: zmq.Frame, status: bytes, answer: bytes) -> None:
        if len(answer) > options.MAX_MESSAGE:
            text = f"an answer must have at most {options.MAX_MESSAGE:,} bytes; got {len(answer):,}"
            status, answer = options.FAILED, text.encode()
        with self._sockets:
            if self._closed:
                return
            # ZeroMQ drops it if the client has gone.
            options.send(self._router, client.bytes, status, answer)
            self._wake_for_the_next()


_open: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Ends the servers that were not closed; a process does not wait for their calls."""
    for server in list(_open):
        server.end(_AT_EXIT, 0)
