"""A replay buffer whose table is in another process, a `ReplayService`, and its reading half."""

from __future__ import annotations

import collections
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import (
    LOOK_PERIOD,
    ReplayClosedError,
    ReplayTimeoutError,
    Sample,
    as_logs,
    checked_priorities,
)
from rlstack.replay.memory import item_bytes
from rlstack.replay.served import checkpoints
from rlstack.replay.served.calls import (
    ANSWER,
    MARGIN,
    NAME,
    Caller,
    ServiceCalls,
    own_name,
    unreachable,
)
from rlstack.replay.served.service import MOST_BATCHES, layout
from rlstack.replay.served.writer import ServedWriter
from rlstack.replay.step_counter import StepCounter
from rlstack.replay.storage import StepRing
from rlstack.rpc import UnavailableError
from rlstack.types import Batch, Logs, PyTree, Transition

_PENDING = 64  # rows that wait to be sent, where items are not whole unrolls
_AHEAD_BYTES = 64 << 20  # largest size of the batches that are drawn ahead
_WAIT = 1.0  # seconds that one call waits on the service
_RETRY = 0.1  # seconds before a service that does not answer is called again


def default_prefetch(cfg: ReplayConfig, spec: Transition) -> int:
    """Returns the number of batches that a reader draws ahead by default.

    Half of them are requested together. A request costs more than its batches if items are small,
    and on few processors its cost delays the learner. Fewer are drawn where priorities make new
    samples more valuable, and none where the params version decides which items a batch has.
    """
    if cfg.min_actors or cfg.max_staleness is not None:
        return 0
    most = _AHEAD_BYTES // (cfg.batch_size * item_bytes(cfg, spec))
    wanted = {"fifo": 1, "uniform": 2 * MOST_BATCHES, "prioritized": MOST_BATCHES // 2}[cfg.sampler]
    return max(1, min(wanted, most))


def default_pending(cfg: ReplayConfig, num_envs: int) -> int:
    """Returns the number of rows that a writer of some environments collects by default.

    For a fifo it is an item of each environment, because what waits here becomes stale.
    """
    return (cfg.unroll_length + 1) * num_envs if cfg.sampler == "fifo" else max(_PENDING, num_envs)


class ServedReplayBuffer:
    """A ``ReplayBuffer`` with its table in a service; `ReplayBuffer` documents the methods.

    It connects when it first writes or reads. One process may sample; any number may write.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        service: Caller,
        spec: Transition,
        *,
        env_ids: range | None = None,
        prefetch: int | None = None,
        max_pending: int | None = None,
        alone: bool = False,
    ):
        """Stores the arguments; the first use connects.

        Args:
          cfg: the rules of the table, the same as the service's.
          num_envs: number of environments of all actors together.
          service: an `rlstack.rpc.RemoteObject` of the service, for this buffer only; ``close``
            closes it.
          spec: shapes and dtypes of one environment's step, from
            `rlstack.acting.actor.transition_spec`.
          env_ids: ids of the environments of this process, which adds their steps; None for all.
          prefetch: number of batches to draw ahead. 0: batches are drawn on request, with the
            newest params version and priorities. None: `default_prefetch`.
          max_pending: number of rows (a step of one environment) that may wait to be sent. 0: every
            ``add`` waits until its step is in the table. None: `default_pending`.
          alone: whether one thread of this process is the service's only user. It then draws and
            adds on request, its steps continue those of a loaded table, and ``load`` works.
        """
        ids = range(num_envs) if env_ids is None else env_ids
        if ids.step != 1 or not 0 <= ids.start < ids.stop <= num_envs:
            raise ValueError(
                f"{NAME}: env_ids must be a range of step 1 within 0..{num_envs - 1}; got {ids}."
            )
        prefetch = default_prefetch(cfg, spec) if prefetch is None else prefetch
        max_pending = default_pending(cfg, len(ids)) if max_pending is None else max_pending
        if prefetch < 0 or max_pending < 0:
            raise ValueError(
                f"{NAME}: prefetch and max_pending must be at least 0; got {prefetch} and "
                f"{max_pending}."
            )
        self._cfg, self._calls, self._closed = cfg, ServiceCalls(service), False
        self._reader = ServedReader(cfg, spec, self._calls, prefetch=0 if alone else prefetch)
        self._writer: ServedWriter | _OnlyWriter
        if alone:
            self._writer = _OnlyWriter(cfg, num_envs, spec, self._calls)
        else:
            form = layout(cfg, num_envs, spec)
            self._writer = ServedWriter(
                cfg, num_envs, ids, spec, self._calls, form, max_pending=max_pending
            )

    def _seconds(self, timeout: float | None) -> float:
        return self._cfg.timeout_seconds if timeout is None else timeout

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; None for all of this writer's."""
        self._writer.add(env_ids, transition, self._seconds(timeout))

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step starts new ones."""
        self._writer.gap(env_ids, self._cfg.timeout_seconds)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all completed items are in the table.

        Raises:
          ReplayTimeoutError: the wait exceeded the timeout; the items are still being sent.
        """
        self._writer.flush(self._seconds(timeout))

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now; with prefetching, without asking the service."""
        return not self._closed and self._reader.can_sample(batch_size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items, or a round; waits while a rule blocks it."""
        return self._reader.sample(batch_size, timeout)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys, before the next batch is requested."""
        self._reader.update_priorities(keys, priorities)

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items, before the next request."""
        self._reader.write_back(keys, updates)

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params, before the next batch is requested."""
        self._reader.set_params_version(int(version))

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until ``close``, or until ``stop`` returns True."""
        while stop is None or not stop():
            try:
                sample = self.sample(timeout=None if stop is None else LOOK_PERIOD)
            except ReplayClosedError:
                if self._closed:
                    return
                raise
            except ReplayTimeoutError:
                if stop is None:
                    raise
                continue
            yield sample

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds of waiting, and the last batch's lag."""
        return self._reader.stats()

    def checkpoint(self, *, keep: int | None = 1) -> str:
        """Makes the service write a checkpoint; returns its path on the service's machine.

        Args:
          keep: number of checkpoints to keep, if the directory is visible here; None for all.

        Raises:
          ValueError: the service has no ``checkpoint_dir``.
          ReplayCheckpointError: the service could not write it, for example because the disk is
            full.
          ReplayTimeoutError: the service does not answer.
        """
        path = Path(self._reader.checkpoint())
        if keep is not None and path.is_dir():
            kept = {p.name for p in checkpoints.numbered(path.parent)[-keep:]}
            checkpoints.keep_only(path.parent, kept, unnumbered_too=True)
        return str(path)

    def save(self) -> PyTree:
        """Returns the service's whole state as numpy arrays."""
        return self._reader.save()

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` of this or another backend returned.

        Raises:
          ValueError: this buffer is not alone, or the saved config differs.
        """
        if not isinstance(self._writer, _OnlyWriter):
            raise ValueError(
                f"{NAME}.load: the buffer must be made with alone=True. Else start the service "
                "from a checkpoint (start_from)."
            )
        steps = jax.tree_util.tree_leaves(tree["steps"])
        seconds = self._cfg.timeout_seconds
        self._calls("load", {**tree, "steps": steps}, seconds=seconds)

    def close(self) -> None:
        """Disconnects and ends all waits; the service keeps running. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._calls.close()
        self._reader.close()


class _OnlyWriter:
    """Adds as the table's own writer, whose thread is the reader's too."""

    def __init__(self, cfg: ReplayConfig, num_envs: int, spec: Transition, calls: ServiceCalls):
        self._cfg, self._calls, self._closed = cfg, calls, False
        self._ids = StepCounter(num_envs)  # checks ids
        self._num_envs, self._checks = num_envs, StepRing(cfg, num_envs)
        leaves = jax.tree_util.tree_leaves(spec)
        self._checks.use(spec, [np.empty((1, num_envs, *x.shape), x.dtype) for x in leaves])
        self._tokens = itertools.count(secrets.randbits(60))
        self._lock = threading.Lock()

    def add(self, env_ids: np.ndarray | None, transition: Transition, timeout: float) -> None:
        """Appends one step of each of some environments."""
        self._check_open("add")
        ids = None if env_ids is None else self._ids.check_ids(f"{NAME}.add", env_ids)
        count = self._num_envs if ids is None else len(ids)
        leaves = [np.asarray(x) for x in self._checks.leaves(transition, count)]
        token, deadline = next(self._tokens), time.monotonic() + timeout
        while True:
            left = max(0.0, min(0.5, deadline - time.monotonic()))
            try:
                reason = self._calls("add", ids, leaves, left, token, seconds=left)
            except UnavailableError as error:
                reason = unreachable("add", error)
            if not reason:
                return
            self._check_open("add")
            if time.monotonic() >= deadline:
                raise ReplayTimeoutError(own_name(reason))

    def gap(self, env_ids: np.ndarray | None, timeout: float) -> None:
        """Drops the unfinished items of these environments."""
        del timeout
        self._check_open("gap")
        ids = None if env_ids is None else self._ids.check_ids(f"{NAME}.gap", env_ids)
        self._calls("break_streams", ids)

    def flush(self, timeout: float) -> None:
        """Does nothing: added steps are in the table."""

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"{NAME}.{where}: the buffer is closed.")

    def close(self) -> None:
        """Ends a wait in ``add``."""
        self._closed = True


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
                raise self._error
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

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items, in a call of its own."""
        if self._closed:
            raise ReplayClosedError(f"{NAME}.write_back: the buffer is closed.")
        leaves = self._treedef.children()[1].flatten_up_to(updates)
        given = [i for i, leaf in enumerate(leaves) if leaf is not None]
        arrays = [np.asarray(leaves[i]) for i in given]
        self._call("write_back", keys, given, arrays, seconds=self._cfg.timeout_seconds)

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
