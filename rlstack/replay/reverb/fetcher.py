"""Threads that fetch items or batches from a Reverb server, and the queue of fetched items."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayTimeoutError
from rlstack.replay.reverb.binding import DATA, KEY, Client, RawItem, Sampler
from rlstack.replay.reverb.client import (
    BATCH_PORT,
    ITEMS,
    SharedMaxima,
    get_number,
    table_info,
    wait_while,
)
from rlstack.replay.reverb.packing import (
    HEAD,
    DrawnBatch,
    Packing,
    fifo_item,
    join_batches,
    make_batch,
)
from rlstack.replay.reverb.table_config import before_min_size, capacity, never_runs_out
from rlstack.replay.rounds import Round, Rounds
from rlstack.rpc import Remote, RemoteObject, UnavailableError
from rlstack.types import PyTree

# The methods of `rlstack.replay.reverb.server.BatchService`. A repeated call draws other items,
# which are as good as the lost ones.
BATCHES = {"take": Remote(idempotent=True)}
_WAIT = 1.0  # seconds that a call waits for items
_MARGIN = 2.0  # seconds that a call may take in addition
_RETRY = 0.1  # seconds between attempts to reach a server that does not answer


class Fetcher:
    """Base of the fetching threads: holds fetched items until they are taken, oldest first.

    The thread fetches only while fewer items are ready than are wanted. So it does not compete for
    the interpreter with a learner that has enough items.

    Attributes:
      changed: condition that guards all attributes and is notified of changes.
      error: the exception that ended the thread, or None.
      fetched: number of items fetched, ever.
    """

    def __init__(self) -> None:
        """Starts the thread. A subclass first sets the attributes that `_fetch` needs."""
        self.changed = threading.Condition()
        self.error: Exception | None = None
        self.fetched = 0
        self._wanted = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reverb-fetcher", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Returns the number of items that are ready."""
        raise NotImplementedError

    def want(self, count: int) -> None:
        """Sets the wanted number of items; the caller holds ``changed``."""
        self._wanted = count
        if count > self.count:
            self.changed.notify_all()

    def _run(self) -> None:
        try:
            self._prepare()
            while self._wait_until_wanted():
                self._fetch()
        except Exception as error:
            with self.changed:
                if not self._closed:
                    self.error = error
                self.changed.notify_all()

    def _wait_until_wanted(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self._closed or self._wanted > self.count)
            return not self._closed

    def _prepare(self) -> None:
        """Waits in the thread until fetching may begin."""

    def _fetch(self) -> None:
        """Fetches items until the wanted number is ready."""
        raise NotImplementedError

    def _interrupt(self) -> None:
        """Wakes the thread if it waits for the server."""

    def close(self) -> None:
        """Ends the thread, unless it waits for a server that does not answer."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._interrupt()
        self._thread.join(timeout=2.0)


class ItemFetcher(Fetcher):
    """Fetches items one by one into an `ItemQueue`.

    Reverb's own threads do the prefetching; they do not need the interpreter.
    """

    def __init__(
        self,
        client: Client,
        address: str,
        packing: Packing,
        cfg: ReplayConfig,
        items: ItemQueue,
        *,
        prefetch: int,
    ):
        """Starts the thread.

        Args:
          client: a client of the server.
          address: the server's address.
          packing: the packing of the items.
          cfg: the rules of the table.
          items: the queue that receives fetched items.
          prefetch: number of items that Reverb prefetches. 0: exactly the wanted items are fetched,
              on request.
        """
        self._client, self._address, self._packing = client, address, packing
        self._prefetch, self._cfg, self._queue = prefetch, cfg, items
        self._items = items.held
        self._sampler: Sampler | None = None
        # If the table can run out of items, notify for each item; otherwise that would waste time.
        self._group = cfg.batch_size if never_runs_out(cfg) else 1
        super().__init__()

    @property
    def count(self) -> int:
        """Returns the number of items that are ready."""
        return len(self._items)

    def take(self, size: int) -> list[RawItem]:
        """Takes the oldest items, or the planned round; the caller holds ``changed``."""
        return self._queue.take(size)

    def drawn(self, taken: list[RawItem]) -> DrawnBatch:
        """Makes a batch of the taken items."""
        return make_batch(self._packing, taken, prioritized=self._cfg.sampler == "prioritized")

    def _prepare(self) -> None:
        if self._prefetch:  # without prefetching, the reader checks first
            early = functools.partial(before_min_size, self._cfg, self._queue.capacity)
            wait_while(early, self._client, self._address, lambda: self._closed)

    def _fetch(self) -> None:
        with self.changed:
            missing = self._wanted - len(self._items)
            if self._closed or missing <= 0:
                return
            if not self._prefetch:
                self._sampler = self._client.NewSampler(ITEMS, missing, missing)
            elif self._sampler is None:
                self._sampler = self._client.NewSampler(ITEMS, -1, self._prefetch)
            sampler = self._sampler
        get = sampler.GetNextTrajectory  # waits without the interpreter's lock
        while missing > 0:
            items = [get() for _ in range(min(missing, self._group))]
            if self._cfg.sampler == "fifo":
                items = [fifo_item(self._packing, self._cfg, item) for item in items]
            with self.changed:
                self._items += items
                self.fetched += len(items)
                missing -= len(items)
                if self._prefetch:
                    missing = self._wanted - len(self._items)
                if missing <= 0 or self._group == 1:
                    self.changed.notify_all()
        if not self._prefetch:
            sampler.Close()

    def _interrupt(self) -> None:
        with self.changed:
            sampler = self._sampler
        if sampler is not None:
            sampler.Close()  # takes up to 3 s when the server is in this process


class BatchFetcher(Fetcher):
    """Fetches whole batches from the server's `BatchService`: one message, not one per item."""

    def __init__(self, client: Client, address: str, cfg: ReplayConfig, prefetch: int):
        """Starts the thread.

        Args:
          client: a client of the server.
          address: the server's address.
          cfg: the rules of the table.
          prefetch: number of items to keep ready; one message contains as many whole batches as
              fit.
        """
        self._client, self._address = client, address
        self._size, self._prefetch = cfg.batch_size, prefetch
        self._batches: list[DrawnBatch] = []  # `take` may have removed items of the first one
        self._service: RemoteObject | None = None
        super().__init__()

    @property
    def count(self) -> int:
        """Returns the number of items that are ready."""
        return sum(len(batch.keys) for batch in self._batches)

    def want(self, count: int) -> None:
        """Sets the wanted number of items, at least ``prefetch``; the caller holds ``changed``."""
        super().want(max(count, self._prefetch))

    def take(self, size: int) -> list[DrawnBatch]:
        """Takes the oldest items, one part per fetched batch; the caller holds ``changed``."""
        taken = []
        while size:
            batch = self._batches.pop(0)
            count = len(batch.keys)
            if count > size:
                self._batches.insert(0, batch.cut(size, count))
                batch, count = batch.cut(0, size), size
            taken.append(batch)
            size -= count
        return taken

    def drawn(self, taken: list[DrawnBatch]) -> DrawnBatch:
        """Makes one batch of the taken parts."""
        return join_batches(taken)

    def _fetch(self) -> None:
        """Fetches some batches, if they arrive in time."""
        try:
            if self._service is None:
                self._service = self._find()
            if self._closed:  # perhaps before the service was found
                return
            most = max(1, self._prefetch // self._size)
            batches = self._service.take(most, _WAIT)
        except (UnavailableError, ReplayTimeoutError):
            # The server may restart, with another port for batches.
            self._interrupt()
            self._service = None
            with self.changed:
                self.changed.wait_for(lambda: self._closed, _RETRY)
            return
        with self.changed:
            self._batches += [DrawnBatch(*batch) for batch in batches]
            self.fetched += sum(len(keys) for keys, *_ in batches)
            self.changed.notify_all()

    def _find(self) -> RemoteObject:
        """Connects to the service."""
        table_info(self._client, self._address, 1.0)  # raises; `get_number` would block forever
        port = int(get_number(self._client, BATCH_PORT))
        host = self._address.rsplit(":", 1)[0]
        return RemoteObject(
            f"{host}:{port}", BATCHES, name="replay", timeout=_WAIT + _MARGIN, retries=0
        )

    def _interrupt(self) -> None:
        if (service := self._service) is not None:
            service.close()


class ItemQueue:
    """A queue of fetched items, which chooses the next ones by params version and round.

    Attributes:
      held: the items, oldest first; `FifoItem` for a fifo.
      capacity: number of items that the table can hold.
      by_version: whether the params version or the environment of an item matters.
      in_rounds: whether batches are rounds.
      stale: number of items dropped because they were too old.
      late: number of items of older versions in rounds.
      round_actors: number of actors that had reported for the last round.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, num_actors: int, maxima: SharedMaxima):
        self._cfg, self._maxima = cfg, maxima
        self.held: list[Any] = []
        self.capacity = capacity(cfg, num_envs)
        self._rounds = Rounds(cfg.min_actors, cfg.grace_seconds, num_actors, num_envs)
        self._round: Round | None = None
        self.in_rounds = cfg.min_actors > 0
        self.by_version = self.in_rounds or cfg.max_staleness is not None
        self.stale = self.late = self.round_actors = 0

    def drop_stale(self) -> None:
        """Drops items that are more than max_staleness versions behind the newest."""
        limit, items = self._cfg.max_staleness, self.held
        if not self.by_version or not items:
            return
        self._maxima.saw_version(max(item.version for item in items))
        if limit is not None:
            fresh = [item for item in items if self._maxima.version - item.version <= limit]
            self.stale += len(items) - len(fresh)
            items[:] = fresh

    def plan_round(self) -> int:
        """Plans the next round; returns its number of items, 0 if it must still wait."""
        env_ids = np.array([item.env_id for item in self.held], np.int64)
        versions = np.array([item.version for item in self.held], np.int64)
        now = time.monotonic()
        self._round = self._rounds.decide(env_ids, versions, self._maxima.version, now)
        if self._round is None:
            # No further item could arrive, so the round takes what there is.
            full = len(self.held) >= self.capacity and not self._rounds.waits_for_time
            if not full:
                return 0
            self._round = self._rounds.decide(
                env_ids, versions, self._maxima.version, now, full=True
            )
        return 0 if self._round is None else len(self._round.take)

    def take(self, size: int) -> list[RawItem]:
        """Takes the oldest items, or the planned round."""
        held = self.held
        if self._round is None:
            items, rest = held[:size], held[size:]
        else:
            taken = set(self._round.take.tolist())
            items = [held[i] for i in self._round.take]
            rest = [item for i, item in enumerate(held) if i not in taken]
            self._rounds.start_over()
            self.late += self._round.late
            self.round_actors, self._round = self._round.actors, None
        if self._cfg.sampler == "fifo":
            for item in items:
                item.times += 1
            rest = [item for item in items if item.times < self._cfg.times_limit] + rest
        held[:] = rest
        return items

    def save(self, packing: Packing) -> dict[str, np.ndarray]:
        """Returns the counters of dropped items and, for a fifo, the items themselves."""
        self.drop_stale()
        items = self.held if self._cfg.sampler == "fifo" else []
        shapes = (self._cfg.unroll_length + 1, packing.step_bytes), (packing.head_bytes,)
        fields = range(DATA, HEAD + (packing.head_bytes > 0))
        parts = {
            name: np.array([item[field] for item in items], np.uint8).reshape(-1, *shape)
            for name, field, shape in zip(("data", "heads"), fields, shapes, strict=False)
        }
        return parts | {
            "keys": np.array([item[KEY] for item in items], np.uint64),
            "times": np.array([item.times for item in items], np.int64),
            "dropped": np.array([self.stale, self.late], np.int64),
        }

    def load(self, tree: PyTree, packing: Packing) -> None:
        """Restores what ``save`` returned."""
        self.stale, self.late = map(int, tree["dropped"])
        parts = [tree["data"], *([tree["heads"]] if "heads" in tree else [])]
        for *data, key, times in zip(*parts, tree["keys"], tree["times"], strict=True):
            fields = [key, np.float64(1), np.int64(1), np.float64(1), *data]
            self.held.append(fifo_item(packing, self._cfg, fields, int(times)))
