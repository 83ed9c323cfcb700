"""The queue of an inference service: its clients, their requests, and when a batch is complete.

The caller that completes a batch computes the whole batch in its own thread: passing the batch to
another thread and back takes longer than acting with a small network. A worker thread takes the
batches that start because their first request has waited long enough.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple

import jax
import numpy as np

from rlstack.acting.inference import Inference

ClientName = str | int  # for example an actor's rank

_RECENT = 0.1  # seconds without a batch after which the worker sleeps until a request comes
_LEAST_SLEEP = 0.0005  # seconds; the worker does not wake more often without a request


class StaleIncarnationError(RuntimeError):
    """A request came from an actor that has been restarted in the meantime."""


class ServiceClosedError(RuntimeError):
    """The service was closed before or during the call."""


class Request:
    """One call, which waits for its answer."""

    __slots__ = ("answer", "arrived", "client", "env_ids", "is_settled", "leaves", "start")

    def __init__(self, env_ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        self.env_ids = env_ids  # [n] int32
        self.leaves = leaves  # the leaves of its timestep, each [n, ...]
        self.arrived = time.perf_counter()
        self.client: Client
        self.start = 0  # the request's first row in the batch
        self.answer: Future[Inference] = Future()
        self.is_settled = False  # whether the future has, or is about to have, a result

    def rows(self, answer: Inference) -> Inference:
        """Returns the rows of this request in the answer to its batch."""
        start, stop = self.start, self.start + len(self.env_ids)
        leaves, structure = jax.tree_util.tree_flatten(answer)
        return structure.unflatten([leaf[start:stop] for leaf in leaves])


class Client:
    """The service's record of one actor."""

    __slots__ = ("incarnation", "index", "name", "seen", "waiting")

    def __init__(self, name: ClientName, index: int, incarnation: int) -> None:
        self.name = name
        self.index = index  # the client's index in the table of owners
        self.incarnation = incarnation
        self.seen = 0.0  # time of its last call or answer
        self.waiting = 0  # number of its requests in the queue


class Clients:
    """The clients, and the environments that each of them owns."""

    def __init__(self, num_envs: int) -> None:
        self._clients: dict[ClientName, Client] = {}
        self._given: dict[ClientName, int] = {}  # the last incarnation that was handed out
        self._owner = np.full(num_envs, -1, np.int32)

    def next_incarnation(self, name: ClientName) -> int:
        """Returns a number above all incarnations of a client so far."""
        client = self._clients.get(name)
        known = -1 if client is None else client.incarnation
        self._given[name] = max(known, self._given.get(name, -1)) + 1
        return self._given[name]

    def admit(
        self, name: ClientName, incarnation: int, env_ids: np.ndarray
    ) -> tuple[Client, np.ndarray | None]:
        """Registers a client's call; from then on the client owns the environments of the call.

        Returns:
          The client; and, at the first call of a new incarnation, the environments that the client
          owned before, ``[num_envs]`` bool, otherwise None.

        Raises:
          StaleIncarnationError: a later incarnation of the client has already called.
          ValueError: another client owns one of the environments.
        """
        client = self._clients.get(name)
        if client is None:
            client = Client(name, len(self._clients), incarnation)
        elif incarnation < client.incarnation:
            raise StaleIncarnationError(
                f"InferenceService.inference: client {name!r} must call as incarnation "
                f"{client.incarnation}, its latest; got {incarnation}. The caller was replaced "
                "and should exit."
            )
        owners = self._owner[env_ids]
        if not (owners == client.index).all():
            self._claim(client, env_ids, owners)
        released = None
        if incarnation > client.incarnation:
            client.incarnation = incarnation
            released = self._owner == client.index
            self._owner[released] = -1
        self._owner[env_ids] = client.index
        self._clients[name] = client
        return client, released

    def all_wait(self, live_since: float) -> bool:
        """Whether every client that called since then has a request in the queue."""
        return all(c.waiting or c.seen < live_since for c in self._clients.values())

    def count(self, live_since: float) -> int:
        """Returns the number of clients that called since then."""
        return sum(c.seen >= live_since for c in self._clients.values())

    def _claim(self, client: Client, ids: np.ndarray, owners: np.ndarray) -> None:
        taken = (owners >= 0) & (owners != client.index)
        if taken.any():
            env_id, owner = ids[taken][0], owners[taken][0]
            other = next(c for c in self._clients.values() if c.index == owner)
            raise ValueError(
                "InferenceService.inference: an environment belongs to one client; got "
                f"{env_id} from {client.name!r}, but {other.name!r} owns it. Give each actor a "
                "rank of its own."
            )


class Taken(NamedTuple):
    """A batch to act on."""

    requests: list[Request]  # sorted by their environments
    to_reset: np.ndarray | None  # [num_envs] bool, environments to reset before acting


class RequestQueue:
    """Requests in the order of arrival; only one batch at a time is computed, until `settle`."""

    def __init__(
        self,
        num_envs: int,
        max_batch: int,
        max_wait_s: float,
        live_s: float,
        lock_step: bool,
        one_thread: bool = False,
    ) -> None:
        """Makes an empty queue; `ServiceConfig` and `InferenceService` explain the arguments."""
        self._num_envs = num_envs
        self._max_batch = num_envs if lock_step else min(max_batch, num_envs)
        self._max_wait = math.inf if lock_step else max_wait_s
        self._live, self._lock_step, self._one_thread = live_s, lock_step, one_thread
        self._condition = threading.Condition()  # guards everything; only the worker waits on it
        self._queue: list[Request] = []
        self._running: list[Request] = []
        self._clients = Clients(num_envs)
        self._to_reset: np.ndarray | None = None
        self._busy = self._closed = False
        self._settled = -math.inf  # when the last batch ended
        self._wakes_at = math.inf  # when the worker wakes without being notified

    def next_incarnation(self, name: ClientName) -> int:
        """Returns a number above all incarnations of a client so far."""
        with self._condition:
            return self._clients.next_incarnation(name)

    def submit(self, request: Request, name: ClientName, incarnation: int) -> Taken | None:
        """Puts a client's request in the queue, or raises: see `Clients.admit`.

        Returns:
          The batch, if the request completed it: the caller acts on it and calls `settle`.
        """
        with self._condition:
            if self._closed:
                raise ServiceClosedError("InferenceService.inference: the service is closed.")
            client, released = self._clients.admit(name, incarnation, request.env_ids)
            replaced: list[Request] = []
            if released is not None:
                replaced = self._replace(client, released)
            elif client.waiting:
                self._refuse_twice(client, request)
            request.client = client
            client.seen = request.arrived
            client.waiting += 1
            self._queue.append(request)
            taken = None
            if not self._busy and not self._is_full():
                self._wake_in_time()
            elif not self._busy and self._one_thread:
                self._condition.notify()
            elif not self._busy:
                taken = self._pop()
        for earlier in replaced:
            text = f"InferenceService: client {name!r} has been restarted."
            earlier.answer.set_exception(StaleIncarnationError(text))
        return taken

    def overdue(self, before: float) -> list[tuple[Request, str]]:
        """Removes the requests that arrived before a time, and says of each why it still waits.

        The caller sets their errors.
        """
        with self._condition:
            running = [request for request in self._running if request.arrived < before]
            late = [(request, "is being acted on") for request in self._settling(running)]
            while self._queue and self._queue[0].arrived < before:
                request = self._queue.pop(0)
                request.client.waiting -= 1
                request.is_settled = True
                late.append((request, f"waits in the queue with {len(self._queue)} others"))
            return late

    def oldest(self) -> float:
        """Returns the arrival time of the oldest waiting request; infinity if none waits."""
        with self._condition:
            waiting = [x for x in self._running + self._queue[:1] if not x.is_settled]
            return min((request.arrived for request in waiting), default=math.inf)

    def take(self) -> Taken | None:
        """Waits for the next batch that is due; returns None when closed and no request is left."""
        with self._condition:
            while self._busy or not self._closed:
                now = time.perf_counter()
                wait = math.inf
                if self._queue and not self._busy:
                    wait = 0.0 if self._is_full() else self._due() - now
                    if wait <= 0:
                        return self._pop()
                    # Wakes up also when a client may no longer count as live.
                    wait = min(wait, max(self._live, 0.001), 1.0)
                elif now - self._settled < _RECENT and self._max_wait >= _LEAST_SLEEP:
                    # No request that comes from now on is due earlier. It need not wake this
                    # thread, which would delay the request itself.
                    wait = min(self._max_wait, 1.0)
                self._wakes_at = now + wait
                self._condition.wait(None if wait == math.inf else wait)
            return None

    def settle(
        self, answer: Inference | None, make_error: Callable[[], Exception] | None = None
    ) -> None:
        """Gives the answer, or an error, to each caller of the batch that was taken last."""
        now = time.perf_counter()
        with self._condition:
            for request in self._running:
                request.client.seen = now
            running, self._running = self._settling(self._running), []
            self._busy, self._settled = False, now
            if self._closed or self._is_full():
                self._condition.notify()
            else:
                self._wake_in_time()
        for request in running:
            if answer is not None:
                request.answer.set_result(request.rows(answer))
            elif make_error is not None:
                request.answer.set_exception(make_error())

    def close(self) -> None:
        """Makes every waiting call raise; the worker gets no more batches."""
        with self._condition:
            self._closed = True
            waiting = self._settling(self._queue + self._running)
            self._queue.clear()
            self._condition.notify()
        for request in waiting:
            error = ServiceClosedError("InferenceService: it has been closed.")
            request.answer.set_exception(error)

    def counts(self) -> tuple[int, int]:
        """Returns the number of queued requests and of live clients."""
        with self._condition:
            live_since = time.perf_counter() - self._live
            return len(self._queue), self._clients.count(live_since)

    @staticmethod
    def _settling(requests: Iterable[Request]) -> list[Request]:
        """Marks requests as settled, and returns those that were not settled before.

        The caller sets their results outside of the lock, because futures run callbacks.
        """
        chosen = [request for request in requests if not request.is_settled]
        for request in chosen:
            request.is_settled = True
        return chosen

    def _wake_in_time(self) -> None:
        """Wakes the worker if it would otherwise sleep until after the first request is due."""
        if self._queue and self._due() < self._wakes_at:
            self._condition.notify()

    def _due(self) -> float:
        """Returns when the first requests are acted on even if others are missing.

        The time of an earlier batch does not count: its clients could not send anything meanwhile.
        """
        return max(self._queue[0].arrived, self._settled) + self._max_wait

    def _is_full(self) -> bool:
        envs = sum(len(request.env_ids) for request in self._queue)
        if envs >= self._max_batch or envs == 0 or self._lock_step:
            return envs >= self._max_batch
        return self._clients.all_wait(time.perf_counter() - self._live)

    def _pop(self) -> Taken:
        envs = count = 0
        for request in self._queue:
            envs += len(request.env_ids)
            if count and envs > self._max_batch:
                break
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        for request in batch:
            request.client.waiting -= 1
        # In the order that a local Inferencer would use, not in the order of arrival.
        batch.sort(key=lambda request: request.env_ids[0])
        self._running, self._busy = batch, True
        # Taken together with the batch: the rows of a restarted actor are reset only after the last
        # requests of its earlier incarnation have been answered.
        to_reset, self._to_reset = self._to_reset, None
        return Taken(batch, to_reset)

    def _replace(self, client: Client, released: np.ndarray) -> list[Request]:
        """Resets a client's rows in the table; returns the requests of its earlier incarnation.

        They have left the queue. The caller sets their errors.
        """
        self._to_reset = released if self._to_reset is None else self._to_reset | released
        replaced = [request for request in self._queue if request.client is client]
        self._queue = [request for request in self._queue if request.client is not client]
        client.waiting = 0
        return self._settling(replaced)

    def _refuse_twice(self, client: Client, request: Request) -> None:
        for other in self._queue:
            if other.client is client and np.isin(request.env_ids, other.env_ids).any():
                raise ValueError(
                    f"InferenceService.inference: client {client.name!r} must wait for the answer "
                    f"for an environment before the next request; got {request.env_ids} while "
                    f"{other.env_ids} wait."
                )
