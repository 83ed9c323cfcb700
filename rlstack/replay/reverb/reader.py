"""The reading half of the Reverb replay: batches and their priorities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import (
    Counts,
    ReplayClosedError,
    ReplayTimeoutError,
    Sample,
    as_logs,
    checked_priorities,
    exceeds_samples_per_insert,
    explain_rule,
)
from rlstack.replay.prioritized import PRIORITY_FLOOR, importance_weights
from rlstack.replay.reverb.binding import Client
from rlstack.replay.reverb.client import (
    ITEMS,
    LARGEST_PRIORITY,
    CallThread,
    SharedMaxima,
    connect,
    put_number,
    result_of,
    table_info,
)
from rlstack.replay.reverb.fetcher import BatchFetcher, ItemFetcher, ItemQueue
from rlstack.replay.reverb.packing import DrawnBatch, Packing
from rlstack.replay.reverb.table_config import TableInfo, before_min_size, blocking_rule, is_batched
from rlstack.replay.served.checkpoints import ReplayCheckpointError
from rlstack.types import Batch, Logs, PyTree

_GROWTH = 1.01  # growth of the largest priority before it is sent to writers


class PriorityUpdates:
    """Sends a reader's priorities to the server (Schaul et al. 2016)."""

    def __init__(
        self,
        cfg: ReplayConfig,
        client: Client,
        address: str,
        calls: CallThread,
        maxima: SharedMaxima,
        *,
        at_once: bool,
    ):
        """Stores the arguments; sends nothing yet.

        Args:
          cfg: the rules of the table.
          client: a client of the server.
          address: the server's address.
          calls: the thread that makes the calls, which may block.
          maxima: the shared maxima, which include the largest priority.
          at_once: whether ``update`` waits until the update is done.
        """
        self._cfg, self._client, self._address = cfg, client, address
        self._calls, self._maxima, self._at_once = calls, maxima, at_once
        self._told = 1.0  # the largest priority sent to writers
        self._pending: Future[None] | None = None

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys, if the sampler uses priorities."""
        keys, priorities = checked_priorities("ReverbReplayBuffer", keys, priorities)
        if self._cfg.sampler != "prioritized" or not keys.size:
            return
        priorities = np.maximum(priorities, PRIORITY_FLOOR)
        self._maxima.saw_priority(float(priorities.max()))
        pairs = list(zip(keys.tolist(), priorities.tolist(), strict=True))
        self._await()  # so that at most one update is pending
        self._pending = self._calls.submit(self._send, pairs)
        if self._at_once:
            self._await()

    def _send(self, pairs: list[tuple[int, float]]) -> None:
        self._client.MutatePriorities(ITEMS, pairs, [])
        largest = self._maxima.largest_priority
        if largest > self._told * (1.0 if self._at_once else _GROWTH):
            put_number(self._client, LARGEST_PRIORITY, largest)
            self._told = largest

    def _await(self) -> None:
        """Waits for the pending update."""
        if self._pending is not None:
            where = "ReverbReplayBuffer.update_priorities"
            result_of(self._pending, where, self._address, self._cfg.timeout_seconds)
            self._pending = None


_LOOK = 0.2  # seconds between two checks of the fetching thread
_POLL = 0.002  # seconds between two checks of the server's table, without prefetching
_ANSWER = 2.0  # seconds within which a running server answers
_FETCHING = "fetching"  # no rule blocks: the items are in the table but not fetched yet


class ReverbReader:
    """Samples from the server at an address; `ReplayBuffer` documents the methods."""

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        packing: Packing,
        address: str,
        *,
        prefetch: int,
        num_actors: int,
        maxima: SharedMaxima,
        closed: Callable[[], bool],
    ):
        """Connects to the server.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments of all actors together.
          packing: the packing of the steps.
          address: the server's address, ``host:port``.
          prefetch: number of items to sample ahead; with 0, ``can_sample`` is exact.
          num_actors: number of actors, needed for rounds. Actors share the environments evenly.
          maxima: the maxima that this half shares with the writing half.
          closed: returns whether the buffer has been closed since.
        """
        self._cfg, self._packing, self._address = cfg, packing, address
        self._prefetch, self._maxima = prefetch, maxima
        self._lock = threading.Lock()
        self._closed = False
        self._samples = 0
        self._lag = np.zeros(1, np.int64)
        self.waited = 0.0  # seconds
        self._client = connect(address, cfg.timeout_seconds, closed)
        self._calls = CallThread()
        self._priorities = PriorityUpdates(
            cfg, self._client, address, self._calls, maxima, at_once=not prefetch
        )
        self._queue = ItemQueue(cfg, num_envs, num_actors, maxima)
        self._fetcher: BatchFetcher | ItemFetcher
        if prefetch and is_batched(cfg, packing.step_bytes):
            self._fetcher = BatchFetcher(self._client, address, cfg, prefetch)
        else:
            self._fetcher = ItemFetcher(
                self._client, address, packing, cfg, self._queue, prefetch=prefetch
            )
        # Items that no reader will receive any more, if this reader is the only one.
        self._sampled_before = self._info().samples
        self._request_next()

    def _request_next(self) -> None:
        """Requests the items of the next sample, if prefetching is on."""
        if self._prefetch:
            with self._fetcher.changed:
                in_rounds = self._queue.in_rounds
                self._fetcher.want(self._queue.capacity if in_rounds else self._cfg.batch_size)

    def _size_of(self, batch_size: int | None) -> int:
        size = self._cfg.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(
                f"ReverbReplayBuffer.sample: batch_size must be at least 1; got {size}."
            )
        return size

    def can_sample(self, batch_size: int | None) -> bool:
        """Whether ``sample`` would succeed now."""
        with self._lock:
            size = self._size_of(batch_size)
            return not self._closed and not self._blocking_rule(size, fetch=False)

    def await_fetch(self) -> bool:
        """Waits for items that have left the server's table or will; returns ``can_sample``.

        It must be the only reader. Without it, ``can_sample`` is False while Reverb's threads still
        fetch the items that it needs.
        """
        size = self._cfg.batch_size
        deadline = time.monotonic() + _ANSWER
        while not self.can_sample(size):
            missing = self._missing_until_sample(size)
            if not missing or time.monotonic() > deadline:
                return False
            self._await_count(self._fetcher.count + missing)
        return True

    def _await_count(self, count: int) -> None:
        """Waits for a moment until this number of items has been fetched."""
        fetcher = self._fetcher

        def is_over() -> bool:
            return self._closed or fetcher.error is not None or fetcher.count >= count

        with fetcher.changed:
            fetcher.changed.wait_for(is_over, _POLL)

    def _missing_until_sample(self, size: int) -> int:
        """Returns the number of items on their way that a sample needs, 0 if it needs others."""
        with self._lock:
            cfg, queue, fetcher = self._cfg, self._queue, self._fetcher
            info = self._info()
            if self._closed or not self._prefetch or self._before_min_size(info):
                return 0
            with fetcher.changed:
                here, fetched = fetcher.count, fetcher.fetched
                underway = max(0, info.samples - self._sampled_before - fetched)
                if cfg.sampler == "fifo":
                    coming = underway + info.size
                    wanted = coming if queue.by_version else size - here
                    return min(wanted, queue.capacity - here) if coming >= wanted else 0
                seen = info._replace(samples=info.samples - underway)
                return 0 if blocking_rule(cfg, seen, size - here) else size - here

    def sample(self, batch_size: int | None, timeout: float | None) -> Sample:
        """Draws a batch of items, or a round."""
        size = self._size_of(batch_size)
        seconds = self._cfg.timeout_seconds if timeout is None else timeout
        with self._lock:
            drawn = self._wait(size, seconds)
            self._request_next()
            return self._finish(self._fetcher.drawn(drawn))

    def _wait(self, size: int, seconds: float) -> list:
        """Waits until no rule blocks a batch; returns the parts of the batch."""
        fetcher, start, wait = self._fetcher, time.monotonic(), _POLL
        if self._prefetch and not self._queue.in_rounds:
            wait = _LOOK
        rule = ""
        try:
            while True:
                if self._closed:
                    raise ReplayClosedError("ReverbReplayBuffer.sample: the buffer is closed.")
                before = rule
                rule = self._blocking_rule(size, fetch=True)
                if not rule:
                    rule = before
                    return self._take(size)
                left = start + seconds - time.monotonic()
                if rule == _FETCHING:
                    left = max(left, start + _ANSWER - time.monotonic())
                if left <= 0:
                    raise ReplayTimeoutError(
                        f"ReverbReplayBuffer.sample: {self._explain(rule, size)} "
                        f"Waited {seconds:g} s."
                    )
                with fetcher.changed:
                    fetcher.changed.wait_for(
                        lambda: self._closed or fetcher.error or fetcher.count >= size,
                        min(left, wait),
                    )
        finally:
            if rule not in ("", _FETCHING):
                self.waited += time.monotonic() - start

    def _take(self, size: int) -> list:
        with self._fetcher.changed:
            if not self._prefetch:
                self._fetcher.want(0)
            return self._fetcher.take(size)

    def _finish(self, drawn: DrawnBatch) -> Sample:
        """Counts a batch, and adds its importance weights (Schaul et al. 2016, section 3.4)."""
        trajectory = self._packing.tree(drawn.leaves)
        versions = np.asarray(trajectory.params_version, np.int64)
        self._maxima.saw_version(int(versions.max()))
        self._lag = self._maxima.version - versions[self._cfg.context + 1]
        if drawn.relative_probs is None:
            weights = np.ones(len(drawn.keys), np.float32)
        else:
            weights = importance_weights(self._cfg, drawn.relative_probs, self._samples)
        self._samples += len(drawn.keys)
        return Sample(Batch(trajectory, weights), drawn.keys)

    def _blocking_rule(self, size: int, *, fetch: bool) -> str:
        """Returns the name of the rule that blocks a sample now, or "".

        Args:
          size: the batch size.
          fetch: whether to begin to fetch missing items.

        Raises:
          ReplayClosedError: the server has ended.
          ReplayTimeoutError: the server does not answer.
        """
        cfg, fetcher = self._cfg, self._fetcher
        if fetcher.error is not None:
            raise ReplayClosedError(
                f"ReverbReplayBuffer.sample: the Reverb server at {self._address} ended: "
                f"{fetcher.error}"
            )
        info = None
        if not self._prefetch:
            info = self._info()
            if self._before_min_size(info):
                return "min_size"
            if self._queue.by_version:
                info = self._fetch_all(size, info)
        with fetcher.changed:
            self._queue.drop_stale()
            if self._queue.in_rounds:
                size = self._queue.plan_round()
                if not size:
                    if self._prefetch:
                        fetcher.want(self._queue.capacity)
                    return "round"
            missing = size - fetcher.count
            if cfg.sampler == "fifo" and cfg.samples_per_insert is not None:
                info = info or self._info()
                if exceeds_samples_per_insert(cfg, info.inserts, self._samples, size):
                    return "samples_per_insert"
            if missing <= 0:
                return ""
            if info is not None and (rule := blocking_rule(cfg, info, missing)):
                return rule
            if self._prefetch:
                fetcher.want(size)
                return "items"
            if fetch:
                fetcher.want(size)
                return _FETCHING
            return ""

    def _info(self) -> TableInfo:
        return table_info(self._client, self._address, _ANSWER)

    def _before_min_size(self, info: TableInfo) -> bool:
        """Whether min_size is not reached, counting items in the table and fetched items."""
        held = info._replace(size=info.size + self._fetcher.count)
        return before_min_size(self._cfg, self._queue.capacity, held)

    def _fetch_all(self, size: int, info: TableInfo) -> TableInfo:
        """Without prefetching, fetches the items of the table, to read their params versions."""
        fetcher, queue = self._fetcher, self._queue
        with fetcher.changed:
            queue.drop_stale()
            missing = (queue.capacity if queue.in_rounds else size) - fetcher.count
            take = min(missing, info.size)
            if take <= 0:
                return info
            count = fetcher.count + take
            fetcher.want(count)
            fetcher.changed.wait_for(lambda: fetcher.count >= count or fetcher.error, _ANSWER)
            fetcher.want(0)
        return self._fetch_all(size, self._info())

    def _explain(self, rule: str, size: int) -> str:
        """Describes a blocking rule in words, with its counters.

        Raises:
          ReplayTimeoutError: the server does not answer.
        """
        cfg, here, info = self._cfg, self._fetcher.count, self._info()
        if rule in ("items", _FETCHING):
            early = self._before_min_size(info)
            rule = "min_size" if early else blocking_rule(cfg, info, size - here) or "items"
        samples = self._samples if cfg.sampler == "fifo" else info.samples
        counts = Counts(info.inserts, samples, info.size + here, self._maxima.version)
        return explain_rule(cfg, rule, size, counts)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; with prefetching, in the background."""
        if self._closed:
            raise ReplayClosedError("ReverbReplayBuffer.update_priorities: the buffer is closed.")
        self._priorities.update(keys, priorities)

    def stats(self) -> Logs:
        """Returns sizes, counters and the lag of the last batch's items."""
        info, fifo = self._info(), self._cfg.sampler == "fifo"
        logs = as_logs(
            size=info.size + (self._fetcher.count if fifo else 0),
            inserts=info.inserts,
            samples=self._samples,
            dropped=info.inserts - info.samples - info.size if fifo else 0,
            dropped_stale=self._queue.stale,
            lag_min=self._lag.min(),
            lag_mean=self._lag.mean(),
            lag_max=self._lag.max(),
        )
        if self._queue.in_rounds:
            logs |= as_logs(late=self._queue.late, round_actors=self._queue.round_actors)
        return logs

    def checkpoint(self) -> str:
        """Makes the server write a checkpoint; returns its path on the server's machine."""
        where = "ReverbReplayBuffer.checkpoint"
        call = self._calls.submit(self._client.Checkpoint)
        try:
            return result_of(call, where, self._address, self._cfg.timeout_seconds)
        except (RuntimeError, ValueError) as error:
            if "no Checkpointer" not in str(error):
                raise ReplayCheckpointError(
                    f"{where}: the server at {self._address} could not write a checkpoint: "
                    f"{error!s:.300}. Free space in its checkpoint_dir (df) or make it "
                    "writable. Earlier checkpoints are intact."
                ) from error
            raise ValueError(
                f"{where}: the server must be started with a checkpoint_dir; the one at "
                f"{self._address} answered: {error}"
            ) from None

    def save(self) -> PyTree:
        """Returns the state that is not on the server: counters, and a fifo's fetched items."""
        with self._lock, self._fetcher.changed:
            return self._queue.save(self._packing) | {
                "counters": np.array([self._samples, self._maxima.version], np.int64),
                "largest_priority": np.float64(self._maxima.largest_priority),
            }

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned."""
        with self._lock, self._fetcher.changed:
            self._samples, version = map(int, tree["counters"])
            self._maxima.saw_version(version)
            self._maxima.saw_priority(float(tree["largest_priority"]))
            self._queue.load(tree, self._packing)

    def close(self) -> None:
        """Ends waiting calls and the threads."""
        self._closed = True
        self._fetcher.close()
        with self._lock:
            self._calls.close()
