"""Whole batches from the Reverb server's process: one message per batch, not one per item.

Fetching an item costs a learner's process 10 us of interpreter time, and another process can fetch
at most about 60k items a second. If updates are short and items are small, updates wait for items.
In the server's own process, Reverb returns items without gRPC, which is five times as fast and
takes no time of other processes. So a service in that process samples the items and lays them out
as a batch. The batch is sent as one message, and the receiver does not copy it (DQN on CartPole,
128 items: 0.05 ms of the learner's process instead of 1.7). The service's port is stored in one of
Reverb's tables, so clients need only the server's address.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayTimeoutError
from rlstack.replay.reverb.binding import Client, RawItem
from rlstack.replay.reverb.client import (
    BATCH_PORT,
    ITEMS,
    get_number,
    put_number,
    table_info,
    wait_while,
)
from rlstack.replay.reverb.fetcher import Fetcher
from rlstack.replay.reverb.packing import DrawnBatch, Packing, join_batches, make_batch
from rlstack.replay.reverb.table_config import TableInfo, never_runs_out, server_prefetch
from rlstack.rpc import RemoteObject, UnavailableError, remote, serve

_FIRST_FETCH = 16  # items of a sampler's first fetch; each further fetch asks for twice as many
_STREAM = 10_000  # items after which a sampler begins again with its first fetch
_LINGER = 0.005  # seconds that a batch waits for others, to be sent in one message
_WAIT = 1.0  # seconds that a call waits for items
_MARGIN = 2.0  # seconds that a call may take in addition
_RETRY = 0.1  # seconds between attempts to reach a server that does not answer


class AlternatingSamplers:
    """Samples items in the server's own process, alternating between several samplers.

    In the server's process a sampler fills its queue in one burst. It starts the next burst only
    when the last item of the previous burst has been taken. So the reader of one sampler and that
    sampler's thread always wait for each other. With two samplers both work at the same time, if
    the reader switches to the other sampler at the end of a burst: 0.20 ms for 128 small items
    instead of 0.38 (two cores). Reverb's constants determine where bursts end, if there is always
    another item to sample. With other constants, switching would help less but do no harm.
    """

    def __init__(self, client: Client, prefetch: int, samplers: int):
        """Begins to sample.

        Args:
          client: a client of the server.
          prefetch: number of items that are sampled ahead.
          samplers: the number of samplers. It must be 1 for tables that can run out of items;
              otherwise one sampler might keep items while the reader waits for another sampler.
        """
        size = max(1, prefetch // samplers)
        self._samplers = [client.NewSampler(ITEMS, -1, size) for _ in range(samplers)]
        gets = [sampler.GetNextTrajectory for sampler in self._samplers]
        self._cycle = itertools.cycle([(get, _bursts(size)) for get in gets])
        self._get, self._left = gets[0], 0

    def take(self, count: int) -> list[RawItem]:
        """Returns ``count`` items; waits for them without the interpreter's lock."""
        items: list[RawItem] = []
        while count:
            if not self._left:
                self._get, bursts = next(self._cycle)
                self._left = next(bursts)
            now, get = min(self._left, count), self._get
            items += [get() for _ in range(now)]
            self._left -= now
            count -= now
        return items

    def close(self) -> None:
        """Makes a waiting ``take`` raise; takes up to 3 s."""
        for sampler in self._samplers:
            sampler.Close()


def _bursts(most: int) -> Iterator[int]:
    """Yields the sizes of a sampler's bursts, given the size of its queue."""
    held = 0
    while True:
        left, size = _STREAM, _FIRST_FETCH
        while left:
            size = min(size, most, left)
            if held + size > most:
                yield held
                held = 0
            held += size
            left -= size
            size *= 2


class BatchMaker(Fetcher):
    """A thread of the server's process that samples batches while fewer are ready than are wanted.

    One thread samples and lays out batches. Two threads would compete for the interpreter, because
    sampling releases and acquires it for each item.
    """

    def __init__(self, client: Client, address: str, packing: Packing, cfg: ReplayConfig):
        """Starts the thread.

        Args:
          client: a client in the server's process.
          address: the server's address.
          packing: the packing of the items.
          cfg: the rules of the table.
        """
        self._client, self._address, self._packing, self._cfg = client, address, packing, cfg
        self._samplers: AlternatingSamplers | None = None
        self._batches: list[DrawnBatch] = []
        self._awaited = 0  # batches that `take` waits for; with fewer, it is not woken
        super().__init__()

    @property
    def count(self) -> int:
        """Returns the number of batches that are ready."""
        return len(self._batches)

    def take(self, most: int, seconds: float) -> list[DrawnBatch]:
        """Takes up to ``most`` of the oldest batches, and requests the same number of new ones."""
        with self.changed:
            self.want(most)
            self._wait_for(1, seconds)
            if self._batches:
                self._wait_for(most, min(_LINGER, seconds))
            taken, self._batches = self._batches[:most], self._batches[most:]
            self.want(most)
            return taken

    def _wait_for(self, count: int, seconds: float) -> None:
        """Waits until ``count`` batches are ready; the caller holds ``changed``."""
        self._awaited = count
        self.changed.wait_for(lambda: self._closed or self.error or self.count >= count, seconds)

    def _prepare(self) -> None:
        def early(info: TableInfo) -> bool:
            return info.inserts < self._cfg.min_size

        wait_while(early, self._client, self._address, lambda: self._closed)

    def _fetch(self) -> None:
        """Makes one batch."""
        cfg = self._cfg
        with self.changed:
            if self._closed:
                return
            if self._samplers is None:
                self._samplers = AlternatingSamplers(
                    self._client, server_prefetch(cfg), 2 if never_runs_out(cfg) else 1
                )
        items = self._samplers.take(cfg.batch_size)
        # New memory each time, because the last batch may not have been sent yet.
        batch = make_batch(
            self._packing, items, prioritized=cfg.sampler == "prioritized", reuse=False
        )
        with self.changed:
            self._batches.append(batch)
            if self.count >= self._awaited:
                self.changed.notify_all()

    def _interrupt(self) -> None:
        with self.changed:
            samplers = self._samplers
        if samplers is not None:
            samplers.close()


class BatchService:
    """Serves batches that are sampled in the Reverb server's process.

    Sampling starts at the first call. From then on the next batch is sampled while the last one is
    sent. If a reader asks for a batch and does not fetch it, the next reader receives it.
    """

    def __init__(
        self, client: Client, address: str, packing: Packing, cfg: ReplayConfig, bind_address: str
    ):
        """Begins to serve.

        Args:
          client: a client in the server's process.
          address: the server's address.
          packing: the packing of the items.
          cfg: the rules of the table.
          bind_address: the address to listen on; see `rlstack.rpc.socket_filter`.
        """
        self._client: Client | None = client
        self._address, self._packing, self._cfg = address, packing, cfg
        self._lock, self._closed = threading.Lock(), False
        self._maker: BatchMaker | None = None
        self._server = serve(self, bind_address=bind_address)
        put_number(client, BATCH_PORT, int(self._server.address.rsplit(":", 1)[1]))

    @remote(idempotent=True)  # a repeated call samples other items, as good as the lost ones
    def take(self, most: int, seconds: float) -> list[DrawnBatch]:
        """Returns up to ``most`` batches that are ready within ``seconds``."""
        with self._lock:  # one reader at a time
            if self._closed or self._client is None:
                return []
            if self._maker is None:
                self._maker = BatchMaker(self._client, self._address, self._packing, self._cfg)
            maker = self._maker
            batches = maker.take(most, seconds)
            if maker.error is not None and not self._closed:
                raise maker.error
            return batches

    def close(self, stop: Callable[[], None]) -> None:
        """Ends waiting calls, which return no batches, then the thread and the service.

        Args:
          stop: stops the Reverb server, so that the thread no longer waits for items.
        """
        self._closed = True
        stop()
        if self._maker is not None:
            self._maker.close()
        self._server.close()
        # Courier keeps this object alive. A connection that it holds would be shared with a later
        # server on the same port, because gRPC shares connections; and gRPC pauses broken ones for
        # a second.
        self._client = self._maker = None


class BatchFetcher(Fetcher):
    """Fetches batches from the server's `BatchService`, in the reader's process."""

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
            self.fetched += sum(len(batch.keys) for batch in self._batches[-len(batches) :])
            self.changed.notify_all()

    def _find(self) -> RemoteObject:
        """Connects to the service."""
        table_info(self._client, self._address, 1.0)  # raises; `get_number` would block forever
        port = int(get_number(self._client, BATCH_PORT))
        host = self._address.rsplit(":", 1)[0]
        return RemoteObject(
            f"{host}:{port}", BatchService, name="replay", timeout=_WAIT + _MARGIN, retries=0
        )

    def _interrupt(self) -> None:
        if (service := self._service) is not None:
            service.close()
