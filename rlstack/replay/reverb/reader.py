"""The reading half of the Reverb replay: batches, priorities, staleness, rounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from rlstack.replay.base import (
    ReplayClosedError,
    ReplayConfig,
    ReplayTimeoutError,
    Sample,
    as_logs,
)
from rlstack.replay.reverb.batches import BatchFetcher
from rlstack.replay.reverb.calls import Calls, Shared, result_of
from rlstack.replay.reverb.fetcher import ItemFetcher
from rlstack.replay.reverb.obstacles import ANSWER, FETCHING, Obstacles
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.priorities import Priorities
from rlstack.replay.reverb.rules import capacity, is_batched
from rlstack.replay.reverb.tables import connect, table_info
from rlstack.replay.reverb.waiting import Waiting
from rlstack.types import Batch, Logs, PyTree

_LOOK = 0.2  # seconds between looks at the thread that fetches
_POLL = 0.002  # seconds between looks at what the server holds, without prefetching


class ReverbReader:
    """Samples from the server at an address; see ``ReplayBuffer`` for what the methods promise."""

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        packing: Packing,
        address: str,
        *,
        prefetch: int,
        num_actors: int,
        shared: Shared,
        closed: Callable[[], bool],
    ):
        """Connects to the server.

        Args:
          cfg: the table.
          num_envs: environments that write, of all actors together.
          packing: of the steps.
          address: of the server, ``host:port``.
          prefetch: items that are sampled ahead; 0 for none, and for an exact ``can_sample``.
          num_actors: that share the environments evenly, for rounds.
          shared: what both halves of a buffer know.
          closed: whether the buffer was closed meanwhile.
        """
        self._cfg, self._packing, self._address = cfg, packing, address
        self._prefetch, self._shared = prefetch, shared
        self._capacity = capacity(cfg, num_envs)
        self._lock = threading.Lock()
        self._closed = False
        self._samples = 0
        self._lag = np.zeros(1, np.int64)
        self.waited = 0.0  # seconds
        self._client = connect(address, cfg.timeout_seconds, closed)
        self._calls = Calls()
        self._priorities = Priorities(
            cfg, self._client, address, self._calls, shared, at_once=not prefetch
        )
        rows: list[list] = []  # items that were fetched one by one
        self._waiting = Waiting(cfg, num_envs, num_actors, rows, shared)
        self._fetcher: BatchFetcher | ItemFetcher
        self._taker: BatchFetcher | Waiting = self._waiting
        if prefetch and is_batched(cfg, packing.step_bytes):
            self._fetcher = self._taker = BatchFetcher(self._client, address, cfg, prefetch)
        else:
            self._fetcher = ItemFetcher(
                self._client, address, packing, cfg, self._capacity, prefetch=prefetch, rows=rows
            )
        self._obstacles = Obstacles(
            cfg,
            self._client,
            address,
            self._fetcher,
            self._waiting,
            shared,
            room=self._capacity,
            ahead=bool(prefetch),
        )
        self._after_sample()

    def _after_sample(self) -> None:
        """Asks for what the next sample will need, where items are fetched ahead."""
        if self._prefetch:
            with self._fetcher.changed:
                self._fetcher.want(
                    self._capacity if self._waiting.in_rounds else self._cfg.batch_size
                )

    def size_of(self, batch_size: int | None) -> int:
        """Returns the batch size to use."""
        size = self._cfg.batch_size if batch_size is None else batch_size
        if size < 1:
            raise ValueError(
                f"ReverbReplayBuffer.sample: batch_size must be at least 1; got {size}."
            )
        return size

    def can_sample(self, batch_size: int | None) -> bool:
        """Whether ``sample`` would succeed now."""
        with self._lock:
            size = self.size_of(batch_size)
            return not self._closed and not self._obstacles.find(size, self._samples, fetch=False)

    def sample(self, batch_size: int | None, timeout: float | None) -> Sample:
        """Draws a batch of items, or a round."""
        size = self.size_of(batch_size)
        seconds = self._cfg.timeout_seconds if timeout is None else timeout
        with self._lock:
            taken = self._wait(size, seconds)
            self._after_sample()
            return self._finish(taken)

    def _wait(self, size: int, seconds: float) -> list:
        """Returns what the next batch is made of."""
        fetcher, start, wait = self._fetcher, time.monotonic(), _POLL
        if self._prefetch and not self._waiting.in_rounds:
            wait = _LOOK
        obstacle = ""
        try:
            while True:
                if self._closed:
                    raise ReplayClosedError("ReverbReplayBuffer.sample: the buffer is closed.")
                before = obstacle
                obstacle = self._obstacles.find(size, self._samples, fetch=True)
                if not obstacle:
                    obstacle = before
                    return self._take(size)
                left = start + seconds - time.monotonic()
                if obstacle == FETCHING:  # there, and only to be brought
                    left = max(left, start + ANSWER - time.monotonic())
                if left <= 0:
                    rule = self._obstacles.explain(obstacle, size, self._samples)
                    raise ReplayTimeoutError(
                        f"ReverbReplayBuffer.sample: {rule} Waited {seconds:g} s."
                    )
                with fetcher.changed:
                    fetcher.changed.wait_for(
                        lambda: self._closed or fetcher.error or fetcher.count >= size,
                        min(left, wait),
                    )
        finally:
            if obstacle not in ("", FETCHING):
                self.waited += time.monotonic() - start

    def _take(self, size: int) -> list:
        """Takes what the next batch is made of."""
        with self._fetcher.changed:
            if not self._prefetch:
                self._fetcher.want(0)
            return self._taker.take(size)

    def _finish(self, taken: list) -> Sample:
        """Makes a batch of what was taken for it."""
        drawn = self._fetcher.drawn(taken)
        trajectory = self._packing.tree(drawn.leaves)
        versions = np.asarray(trajectory.params_version, np.int64)
        self._shared.saw_version(int(versions.max()))
        self._lag = self._shared.version - versions[self._cfg.context + 1]
        weights = self._priorities.weights(len(drawn.keys), drawn.odds, self._samples)
        self._samples += len(drawn.keys)
        return Sample(Batch(trajectory, weights), drawn.keys)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; with prefetching, in the background."""
        if self._closed:
            raise ReplayClosedError("ReverbReplayBuffer.update_priorities: the buffer is closed.")
        self._priorities.update(keys, priorities)

    def stats(self) -> Logs:
        """Returns sizes, counters and the lag of the last batch's items."""
        info = table_info(self._client, self._address, ANSWER)
        fifo = self._cfg.sampler == "fifo"
        logs = as_logs(
            size=info.size + (self._fetcher.count if fifo else 0),
            inserts=info.inserts,
            samples=self._samples,
            dropped=info.inserts - info.samples - info.size if fifo else 0,
            dropped_stale=self._waiting.stale,
            lag_min=self._lag.min(),
            lag_mean=self._lag.mean(),
            lag_max=self._lag.max(),
        )
        if self._waiting.in_rounds:
            logs |= as_logs(late=self._waiting.late, round_actors=self._waiting.round_actors)
        return logs

    def checkpoint(self) -> str:
        """Makes the server write a checkpoint; returns its path there."""
        where = "ReverbReplayBuffer.checkpoint"
        try:
            return result_of(
                self._calls.submit(self._client.Checkpoint),
                where,
                self._address,
                self._cfg.timeout_seconds,
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{where}: the server must have been given a checkpoint_dir; the one at "
                f"{self._address} answers: {error}"
            ) from None

    def save(self) -> PyTree:
        """Returns what is not on the server: counters, and a fifo's fetched items."""
        with self._lock, self._fetcher.changed:
            shape = self._cfg.unroll_length + 1, self._packing.step_bytes
            return self._waiting.save(shape) | {
                "counters": np.array([self._samples, self._shared.version], np.int64),
                "largest_priority": np.float64(self._shared.largest_priority),
            }

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned."""
        with self._lock, self._fetcher.changed:
            self._samples, version = map(int, tree["counters"])
            self._shared.saw_version(version)
            self._shared.saw_priority(float(tree["largest_priority"]))
            self._waiting.load(tree, self._packing)

    def close(self) -> None:
        """Wakes who waits, and ends the threads."""
        self._closed = True
        self._fetcher.close()
        with self._lock:
            self._calls.close()
