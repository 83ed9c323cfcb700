"""The reading half of a served replay: batches, priorities and params versions."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayClosedError, ReplayTimeoutError, Sample, as_logs
from rlstack.replay.prioritized import checked_priorities
from rlstack.replay.served.calls import ANSWER, MARGIN, NAME, ServiceCalls, own_name, unreachable
from rlstack.rpc import UnavailableError
from rlstack.types import Batch, Logs, PyTree, Transition

_WAIT = 1.0  # seconds that one call waits on the service
_RETRY = 0.1  # seconds before a service that does not answer is called again


class _Drawn(NamedTuple):
    """Batches as the service sends them, with a leading axis, or one of them."""

    keys: np.ndarray
    weights: np.ndarray
    version: int  # the newest params version that the service knew
    leaves: list[np.ndarray]

    def batches(self) -> list[_Drawn]:
        """Returns a list of the batches, as views."""
        each = zip(self.keys, self.weights, *self.leaves, strict=True)
        return [_Drawn(keys, weights, self.version, leaves) for keys, weights, *leaves in each]


class ServedReader:
    """Samples from a service.

    With ``prefetch``, a thread requests the next batches while the learner uses the last one.
    Params versions and priorities travel with the next request, before it draws.
    """

    def __init__(
        self, cfg: ReplayConfig, spec: Transition, calls: ServiceCalls, *, prefetch: int
    ) -> None:
        """Stores the parts; requests begin later.

        Args:
          cfg: the rules of the table.
          spec: the spec of one environment's step.
          calls: the service.
          prefetch: number of batches that are drawn ahead.
        """
        self._cfg, self._calls, self._prefetch = cfg, calls, prefetch
        # Half of the batches are requested together: a message of two costs little more than one.
        self._low = prefetch // 2
        self._treedef = jax.tree_util.tree_structure(spec)
        self._takes_priorities = cfg.sampler == "prioritized" or bool(cfg.sampler_factory)
        self._changed = threading.Condition()
        self._ready: collections.deque[_Drawn] = collections.deque()
        self._reason = "batches are requested from the replay service; none has arrived."
        self._error: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._news = threading.Lock()
        self._version = -1  # the params version to send
        self._updates: list[tuple[np.ndarray, np.ndarray]] = []  # priorities to send
        self._newest = -1  # version that was set or seen
        self._lag = np.zeros(1, np.int64)
        self.waited = 0.0  # seconds

    def size_of(self, batch_size: int | None) -> int:
        """Returns the batch size to use.

        Raises:
          ValueError: the batch size is less than 1.
        """
        size = self._cfg.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(f"{NAME}.sample: batch_size must be at least 1; got {size}.")
        return size

    def sample(self, batch_size: int | None, timeout: float | None) -> Sample:
        """Draws a batch of items, or a round; waits while a rule blocks it."""
        size = self.size_of(batch_size)
        seconds = self._cfg.timeout_seconds if timeout is None else timeout
        ahead = self._prefetch and size == self._cfg.batch_size
        return self._finish(self._next(seconds) if ahead else self._request(size, seconds))

    def can_sample(self, batch_size: int | None) -> bool:
        """Whether ``sample`` would succeed now.

        Raises:
          ReplayTimeoutError: the service does not answer.
        """
        size = self.size_of(batch_size)
        if self._closed:
            return False
        if self._prefetch and size == self._cfg.batch_size:
            with self._changed:
                self._start()
                return bool(self._ready)
        return bool(self._call("can_sample", size, (self._version, [], [])))

    def _call(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Calls a method; raises ReplayTimeoutError if the service does not answer."""
        try:
            return self._calls(method, *arguments, seconds=seconds)
        except UnavailableError as error:
            raise ReplayTimeoutError(unreachable(method, error)) from error

    def _tell(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Calls a method that first sets the priorities of this reader's updates."""
        with self._news:
            updates, self._updates = self._updates, []
        news = self._version, [keys for keys, _ in updates], [values for _, values in updates]
        try:
            return self._call(method, *arguments, news, seconds=seconds)
        except ReplayTimeoutError:
            with self._news:
                self._updates = updates + self._updates
            raise

    def _request(self, size: int, seconds: float) -> _Drawn:
        """Requests one batch."""
        now = time.monotonic()
        deadline = now + seconds
        while True:
            if self._closed:
                raise ReplayClosedError(f"{NAME}.sample: the buffer is closed.")
            before, left = now, max(0.0, min(_WAIT, deadline - now))
            drawn, reason = self._tell("take", size, 1, left, seconds=left)
            if drawn is not None:
                return _Drawn(*drawn).batches()[0]
            now = time.monotonic()
            self.waited += now - before if seconds else 0.0
            if now >= deadline:
                raise ReplayTimeoutError(own_name(reason))

    def _next(self, seconds: float) -> _Drawn:
        """Returns the oldest batch that was drawn ahead."""
        with self._changed:
            self._start()
            if not self._ready:
                started = time.monotonic()
                self._changed.wait_for(lambda: self._ready or self._error or self._closed, seconds)
                self.waited += time.monotonic() - started
            if self._closed:
                raise ReplayClosedError(f"{NAME}.sample: the buffer is closed.")
            if self._ready:
                drawn = self._ready.popleft()
                if len(self._ready) <= self._low:
                    self._changed.notify_all()
                return drawn
            if self._error is not None:
                raise ReplayClosedError(
                    f"{NAME}.sample: no batch can be drawn: {self._error}"
                ) from self._error
            raise ReplayTimeoutError(f"{own_name(self._reason)} Waited {seconds:g} s.")

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="replay-reader", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Requests batches while few are ready."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) <= self._low)
                    if self._closed:
                        return
                    most = self._prefetch - len(self._ready)
                self._fetch(most)
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _fetch(self, most: int) -> None:
        try:
            drawn, reason = self._tell("take", self._cfg.batch_size, most, _WAIT, seconds=_WAIT)
        except ReplayTimeoutError as error:  # the program ends if the service is lost
            drawn, reason = None, str(error)
            time.sleep(_RETRY)
        batches = [] if drawn is None else _Drawn(*drawn).batches()
        with self._changed:
            self._ready.extend(batches)
            self._reason = reason or self._reason
            self._changed.notify_all()

    def _finish(self, drawn: _Drawn) -> Sample:
        trajectory = self._treedef.unflatten(drawn.leaves)
        # Consecutive items may share a step, which is then older than the other steps of the second
        # item. So an item's version is read at its second step.
        own = np.asarray(trajectory.params_version[self._cfg.context + 1], np.int64)
        self._newest = max(self._newest, self._version, drawn.version)
        self._lag = self._newest - own
        return Sample(Batch(trajectory, drawn.weights), drawn.keys)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; with prefetching, with the next request."""
        if self._closed:
            raise ReplayClosedError(f"{NAME}.update_priorities: the buffer is closed.")
        keys, priorities = checked_priorities(NAME, keys, priorities)
        if self._takes_priorities and keys.size:
            with self._news:
                self._updates.append((keys.copy(), priorities.copy()))
            if not self._prefetch:  # a new item has the largest priority, as in a single process
                self._tell("hear")

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params; it is sent with the next request."""
        self._version = max(self._version, version)

    def stats(self) -> Logs:
        """Returns the service's counters, with this reader's lag and waiting time."""
        news: tuple = (self._version, [], [])
        logs: Logs = self._call("stats", news, seconds=ANSWER - MARGIN)
        lag = as_logs(lag_min=self._lag.min(), lag_mean=self._lag.mean(), lag_max=self._lag.max())
        return {**logs, **lag, **as_logs(sample_wait_seconds=self.waited)}

    def save(self) -> PyTree:
        """Returns the service's whole state."""
        tree: Any = self._tell("save", seconds=self._cfg.timeout_seconds)
        return {**tree, "steps": self._treedef.unflatten(tree["steps"])}

    def checkpoint(self) -> str:
        """Makes the service write a checkpoint; returns its path on the service's machine."""
        self.stats()  # raises soon if the service has ended
        return str(self._tell("checkpoint", seconds=self._cfg.timeout_seconds))

    def close(self) -> None:
        """Ends waiting calls and the thread; the service's calls must be closed first."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=2.0)
