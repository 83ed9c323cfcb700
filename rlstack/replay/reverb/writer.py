"""The writing half of the Reverb replay: collects steps and sends items to the server."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.reverb import binding
from rlstack.replay.reverb.client import (
    ITEMS,
    LARGEST_PRIORITY,
    CallThread,
    SharedMaxima,
    connect,
    get_number,
    table_info,
)
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.table_config import is_whole
from rlstack.replay.step_counter import StepCounter, restore_into
from rlstack.types import PyTree, StepType, Transition

_LAST = int(StepType.LAST)
_SLICE = 0.1  # seconds after which a wait checks whether the buffer was closed
_SETTLE = 0.1  # seconds in which the table accepts items if no rule blocks them
_REFRESH = 1.0  # seconds between two reads of the largest priority
# From 50 items of one stream that are unsent or in transit, Reverb prints a warning for every tenth
# one. An actor that waits for its learner would fill the disk with them.
_MAX_PER_STREAM = 49
_MAX_ENVS = 24  # environments per stream, so that a stream can have more items in transit


@dataclasses.dataclass
class _Stream:
    """A stream of items of the environments from `first` to before `end`."""

    writer: binding.TrajectoryWriter
    first: int
    end: int
    pending: int = 0  # items that may be unsent or in transit


class ReverbWriter:
    """Makes items from the steps of some environments.

    One array of packed rows holds the last T + 1 steps of each environment. So a step of all
    environments is written by one assignment per leaf, and a finished window is one slice. Only
    Reverb's own two calls are made item by item.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        env_ids: range,
        packing: Packing,
        address: str,
        *,
        max_pending: int,
        maxima: SharedMaxima,
        closed: Callable[[], bool],
    ):
        """Connects to the server.

        Args:
          cfg: the rules of the table.
          env_ids: consecutive ids of the environments of this writer.
          packing: the packing of the steps.
          address: the server's address, ``host:port``.
          max_pending: number of unsent items, or items in transit, above which ``add`` waits, or
              a lower one at which Reverb does not warn; 0 makes every ``add`` wait until its items
              are in the table.
          maxima: the maxima that this half shares with the reading half.
          closed: returns whether the buffer has been closed since.
        """
        self._cfg, self._env_ids, self._packing = cfg, env_ids, packing
        self._address, self._max_pending, self._maxima = address, max_pending, maxima
        self._length, self._rows = cfg.unroll_length, cfg.unroll_length + 1
        num_envs = len(env_ids)
        self._whole = is_whole(cfg, packing.step_bytes)
        self._ring = np.zeros((num_envs, self._rows, packing.step_bytes), np.uint8)
        packing.env_ids(self._ring)[:] = np.array(env_ids)[:, None]
        self._heads = np.zeros((num_envs, self._rows, packing.head_bytes), np.uint8)
        self._views = packing.views(self._ring, self._heads)
        self._offsets = np.arange(self._rows)
        self._counter = StepCounter(num_envs)  # counts steps since the last gap
        self._lock, self._closed = threading.Lock(), False
        self.waited = 0.0  # seconds
        # References to the rows, and to the heads, of each environment.
        self._refs, self._head_refs = (
            [
                collections.deque[object](maxlen=self._rows)
                for _ in range(0 if self._whole else num_envs)
            ]
            for _ in range(2)
        )
        self._client = connect(address, cfg.timeout_seconds, closed)
        firsts = range(0, num_envs, _MAX_ENVS)
        ends = [min(num_envs, i + _MAX_ENVS) for i in firsts]
        pairs = zip(firsts, ends, strict=True)
        self._streams = [_Stream(self._open(end - i), i, end) for i, end in pairs]
        self._calls = CallThread() if cfg.sampler == "prioritized" else None
        self._asked: Future[float] | None = None
        self._asked_at = -_REFRESH

    def _open(self, width: int) -> binding.TrajectoryWriter:
        """Opens a stream of items.

        It has a column for the rows of each of ``width`` environments, and one for its heads.
        """
        # Whole items are sent immediately. Steps that items share are sent in chunks. Short chunks
        # cost memory. Long chunks cost time in sampling, because they contain more than an item
        # needs.
        chunk = self._cfg.step_period if self._cfg.step_period > 1 else self._rows
        if self._whole or self._length == 1:
            chunk = 1
        keep = 1 if self._whole else max(chunk, self._rows)
        options = binding.load().ConstantChunkerOptions(chunk, keep)
        writer = self._client.NewTrajectoryWriter(options, 3000)
        for column in range(width, 2 * width if self._packing.head_bytes else width):
            # Items share no heads, so longer chunks would be sent with parts that nobody needs.
            alone = binding.load().ConstantChunkerOptions(1, 1 if self._whole else self._rows)
            writer.ConfigureChunker(column, alone)
        return writer

    def add(self, env_ids: np.ndarray | None, transition: Transition, timeout: float) -> None:
        """Appends one step of each of some environments; see ``ReplayBuffer.add``."""
        with self._lock:
            self._check_open("add")
            ids = self._local(env_ids, "add")
            count = len(self._env_ids) if ids is None else len(ids)
            leaves = self._packing.leaves(transition, count)
            self._wait_for_pending(timeout)
            self._maxima.saw_version(int(leaves[-1].max()))
            counter = self._counter
            if ids is None and (counter.together or counter.rejoin()):
                self._add_all(leaves)
            else:
                self._add_some(counter.envs if ids is None else ids, leaves)

    def _add_all(self, leaves: list[np.ndarray]) -> None:
        """Adds a step of every environment, all at the same step."""
        counter = self._counter
        row = counter.step % self._rows
        for view, leaf in zip(self._views, leaves, strict=True):
            view[:, row] = leaf
        if not self._whole:
            steps = np.full(len(counter.envs), counter.step)
            self._append_steps(counter.envs, steps)
        start = counter.step - self._length
        counter.step += 1
        if start >= 0 and start % self._cfg.step_period == 0:
            self._complete(counter.envs, np.full(len(counter.envs), start))

    def _add_some(self, ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Adds a step of some environments, each at its own step."""
        self._counter.separate()
        steps = self._counter.steps[ids]
        rows = steps % self._rows
        for view, leaf in zip(self._views, leaves, strict=True):
            view[ids, rows] = leaf
        if not self._whole:
            self._append_steps(ids, steps)
        self._counter.steps[ids] = steps + 1
        starts = steps - self._length
        due = (starts >= 0) & (starts % self._cfg.step_period == 0)
        if due.any():
            self._complete(ids[due], starts[due])

    def _complete(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Makes the items that start at these steps, if items may start there."""
        if self._cfg.starts == "not_last":
            may = self._views[0][ids, (starts + self._cfg.context) % self._rows] != _LAST
            ids, starts = ids[may], starts[may]
        if ids.size:
            self._create(ids, starts)

    def _local(self, env_ids: np.ndarray | None, where: str) -> np.ndarray | None:
        """Returns ids relative to this writer's first id; None for all in order."""
        where = f"ReverbReplayBuffer.{where}"
        return self._counter.check_own_ids(where, env_ids, self._env_ids.start)

    def _append_steps(self, ids: np.ndarray, steps: np.ndarray) -> None:
        """Appends a step of each environment, in one call per stream, with a column for each."""
        rows, heads = self._columns(ids, self._ring[ids, steps % self._rows]), self._columns([], [])
        after = steps - self._packing.head_step
        starts = (after >= 0) & (after % self._cfg.step_period == 0)
        if self._packing.head_bytes and starts.any():
            due, at = ids[starts], steps[starts] % self._rows
            heads = self._columns(due, self._heads[due, at])
        for stream in self._streams:
            own = slice(stream.first, stream.end)
            if len(self._streams) > 1 and all(column is None for column in rows[own]):
                continue
            width = stream.end - stream.first
            more = heads[own] if self._packing.head_bytes else []
            refs = stream.writer.Append(rows[own] + more)
            for env in range(stream.first, stream.end):
                if rows[env] is not None:
                    self._refs[env].append(refs[env - stream.first])
                if heads[env] is not None:
                    self._head_refs[env].append(refs[env - stream.first + width])

    def _columns(self, ids: Any, values: Any) -> list[np.ndarray | None]:
        """Returns a list of all environments with the values of these."""
        columns: list[np.ndarray | None] = [None] * len(self._env_ids)
        for env, value in zip(list(ids), values, strict=True):
            columns[env] = value
        return columns

    def _create(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Makes the items that start at these steps."""
        priority = self._priority()
        if len(self._streams) == 1:
            self._create_in(self._streams[0], ids, starts, priority)
        else:
            for stream in self._streams:
                own = (ids >= stream.first) & (ids < stream.end)
                if own.any():
                    self._create_in(stream, ids[own], starts[own], priority)
        if not self._max_pending:
            self._flush(0.0, _SETTLE)

    def _create_in(
        self, stream: _Stream, ids: np.ndarray, starts: np.ndarray, priority: float
    ) -> None:
        writer, has_head = stream.writer, self._packing.head_bytes > 0
        if self._whole:
            rows = (starts[:, None] + self._offsets) % self._rows
            sent: list[np.ndarray | None] = list(self._ring[ids[:, None], rows])
            width = stream.end - stream.first
            if has_head:
                at = (starts + self._packing.head_step) % self._rows
                sent += [None] * (width - len(ids)) + list(self._heads[ids, at])
            refs = writer.Append(sent)
            items = [[[ref]] for ref in refs[: len(ids)]]
            heads = refs[width:]
        else:
            items = [[list(self._refs[env])] for env in ids.tolist()]
            later = (self._length - self._packing.head_step) // self._cfg.step_period
            heads = [self._head_refs[env][-1 - later] for env in ids.tolist() if has_head]
        for i, item in enumerate(items):
            more = [[heads[i]]] if has_head else []
            squeezed = [self._whole, True] if has_head else [self._whole]
            writer.CreateItem(ITEMS, priority, item + more, squeezed)
        stream.pending += len(items)

    def _priority(self) -> float:
        """Returns the priority of a new item: the largest priority set so far, as last read."""
        if self._calls is None:
            return 1.0
        now = time.monotonic()
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:
                self._maxima.saw_priority(self._asked.result())
            self._asked = None
        if self._asked is None and now - self._asked_at > _REFRESH:
            self._asked = self._calls.submit(get_number, self._client, LARGEST_PRIORITY)
            self._asked_at = now
        return self._maxima.largest_priority

    def _limit(self, stream: _Stream) -> int:
        """Returns the number of pending items of a stream above which ``add`` waits."""
        num_envs = stream.end - stream.first
        share = self._max_pending * num_envs // len(self._env_ids)
        return min(share, _MAX_PER_STREAM - num_envs)

    def _wait_for_pending(self, timeout: float) -> None:
        """Waits until each stream has few pending items, so that another step may be added."""
        if all(stream.pending <= self._limit(stream) for stream in self._streams):
            return
        start = time.monotonic()
        in_time = self._flush(0.5, timeout)
        self.waited += time.monotonic() - start
        if in_time:
            return
        table_info(self._client, self._address, 1.0)  # raises if the server does not answer
        pending = sum(stream.pending for stream in self._streams)
        raise ReplayTimeoutError(
            f"ReverbReplayBuffer.add: the table at {self._address} must accept {pending} "
            f"items before more are added; it did not within {timeout:g} s. Is the learner "
            "running, and sampling fast enough for samples_per_insert and max_size?"
        )

    def _flush(self, leave: float, timeout: float) -> bool:
        """Waits until each stream has at most this share of its limit pending.

        Returns:
          False after the timeout.
        """
        deadline = time.monotonic() + timeout
        for stream in self._streams:
            limit = self._limit(stream)
            if leave and stream.pending <= limit:
                continue
            if not self._flush_one(stream, int(leave * limit), deadline):
                return False
        return True

    def _flush_one(self, stream: _Stream, leave: int, deadline: float) -> bool:
        while True:
            left = min(_SLICE, deadline - time.monotonic())
            try:
                stream.writer.Flush(leave, max(1, int(left * 1000)))
                stream.pending = min(stream.pending, leave)
                return True
            except RuntimeError as error:
                if "Timeout" not in str(error) and "Deadline" not in str(error):
                    raise ReplayClosedError(
                        f"ReverbReplayBuffer: items could not be sent to {self._address}: {error}"
                    ) from error
            self._check_open("add")
            if time.monotonic() >= deadline:
                return False

    def flush(self, timeout: float) -> None:
        """Waits until all completed items are in the table.

        Raises:
          ReplayTimeoutError: the wait exceeded the timeout; the items are still being sent.
        """
        with self._lock:
            self._check_open("flush")
            if not self._flush(0.0, timeout):
                raise ReplayTimeoutError(
                    f"ReverbReplayBuffer.flush: the table at {self._address} must accept all "
                    f"items; it did not within {timeout:g} s. Is it full?"
                )

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments."""
        with self._lock:
            self._check_open("gap")
            ids = self._local(env_ids, "gap")
            ids = self._counter.envs if ids is None else ids
            self._counter.separate()
            self._counter.steps[ids] = 0
            self._counter.rejoin()
            for env in () if self._whole else ids.tolist():
                self._refs[env].clear()
                self._head_refs[env].clear()

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"ReverbReplayBuffer.{where}: the buffer is closed.")

    def save(self) -> PyTree:
        """Returns the steps of unfinished items."""
        with self._lock:
            self._check_open("save")
            self._flush(0.0, self._cfg.timeout_seconds)
            saved = {"rows": self._ring.copy(), "since": self._counter.last_steps() + 1}
            return saved | ({"heads": self._heads.copy()} if self._packing.head_bytes else {})

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        with self._lock:
            self._check_open("load")
            self._counter.separate()
            since = self._counter.steps
            parts = [tree["rows"], *([tree["heads"]] if "heads" in tree else [])]
            if self._packing.head_bytes and len(parts) == 1:
                parts = list(self._packing.divided(np.asarray(tree["rows"])))
            for into, part in zip((self._ring, self._heads), parts, strict=False):
                restore_into(into, part, "the steps of unfinished items")
            restore_into(since, tree["since"], "since, one number for each environment,")
            self._counter.rejoin()
            for back in () if self._whole else range(self._rows, 0, -1):
                ids = np.flatnonzero(since >= back)
                if ids.size:
                    self._append_steps(ids, since[ids] - back)

    def close(self) -> None:
        """Sends the completed items that the table accepts immediately, and ends the stream."""
        self._closed = True  # ends a wait in `add`
        with self._lock:
            if not self._streams:
                return
            for stream in self._streams:
                with contextlib.suppress(RuntimeError):  # a full table refuses items; they are lost
                    stream.writer.Flush(0, int(_SETTLE * 1000 / len(self._streams)))
                stream.writer.Close()
            self._streams = []
            self._refs = self._head_refs = []
            if self._calls is not None:
                self._calls.close()
