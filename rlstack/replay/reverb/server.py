"""The Reverb server that holds one table of items, and the service that sends batches of them.

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
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rlstack.configs.replay import NO_FACTORY, ReplayConfig
from rlstack.replay.reverb import binding
from rlstack.replay.reverb.client import (
    BATCH_PORT,
    ITEMS,
    LARGEST_PRIORITY,
    put_number,
    table_infos,
    wait_while,
)
from rlstack.replay.reverb.fetcher import BATCHES, Fetcher
from rlstack.replay.reverb.packing import DrawnBatch, Packing, make_batch
from rlstack.replay.reverb.table_config import (
    UNLIMITED,
    TableInfo,
    capacity,
    is_batched,
    never_runs_out,
    rate_limits,
    server_prefetch,
)
from rlstack.replay.served import checkpoints
from rlstack.rpc import serve
from rlstack.rpc.addresses import ALL_ADDRESSES
from rlstack.rpc.socket_filter import restrict_listeners
from rlstack.types import PyTree, Transition

_FIRST_FETCH = 16  # items of a sampler's first fetch; each further fetch asks for twice as many
_STREAM = 10_000  # items after which a sampler begins again with its first fetch
_LINGER = 0.005  # seconds that a batch waits for others, to be sent in one message


class ReverbServer:
    """A server in this process, with one table, on one port.

    Like all servers of Reverb and Courier, it has no authentication, and by default it listens on
    all addresses. If readers receive whole batches (`is_batched`), it also listens on a second,
    free port.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        spec: Transition,
        *,
        port: int | None = None,
        checkpoint_dir: str | Path | None = None,
        start_from: str | Path | None = None,
        bind_address: str = ALL_ADDRESSES,
    ):
        """Starts the server.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments of all actors together.
          spec: the spec of one environment's step (`rlstack.acting.actor.transition_spec`).
          port: the port to listen on; None for a free one.
          checkpoint_dir: the directory of checkpoints; the table begins with the newest one. None:
              no checkpoints and no ``save``.
          start_from: the checkpoint to begin with instead.
          bind_address: the address of this host to listen on, in addition to loopback; default:
              all.

        Raises:
          ValueError: the port is in use, or the checkpoint is incomplete or belongs to another
              table.
          ImportError: Reverb is not installed.
        """
        self._reverb = binding.load()
        self._cfg, self._num_envs, self._bind_address = cfg, num_envs, bind_address
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._packing = Packing(spec)
        self.port = _free_port(port)
        self.address = f"localhost:{self.port}"
        self._server: binding.Server | None = None
        self._batches: BatchService | None = None
        first: Path | None = None
        if self._directory is not None:
            checkpoints.prepare(self._directory)
            first = checkpoints.newest(self._directory)
        if start_from is not None:
            first = Path(start_from)
        if first is not None and not checkpoints.is_complete(first):
            raise ValueError(
                f"ReverbServer: {first} must be a complete checkpoint; it has no file DONE. Start "
                "from another one, or without one."
            )
        self._start(first)

    def _start(self, first: Path | None) -> None:
        reverb, cfg = self._reverb, self._cfg
        if cfg.needs_table:
            raise ValueError(f"ReverbServer: {cfg.needs_table} must be left out, {NO_FACTORY}.")
        sampler = {
            "fifo": reverb.FifoSelector,
            "uniform": reverb.UniformSelector,
            "prioritized": lambda: reverb.PrioritizedSelector(cfg.priority_exponent),
        }[cfg.sampler]()
        # Readers enforce min_size, because it counts inserts and Reverb's own minimum counts items
        # held.
        limit = rate_limits(cfg, self._num_envs)
        limiter = reverb.RateLimiter(limit.samples_per_insert, 1, limit.min_diff, limit.max_diff)
        size = capacity(cfg, self._num_envs)
        # A fifo's items are sent once; the reader repeats items that may be in several batches.
        times = 1 if cfg.sampler == "fifo" else cfg.times_limit
        selector = reverb.FifoSelector
        tables = [reverb.Table(ITEMS, sampler, selector(), size, times, limiter, [], None)]
        for name in (LARGEST_PRIORITY, BATCH_PORT):
            free = reverb.RateLimiter(1.0, 1, -UNLIMITED, UNLIMITED)
            tables.append(reverb.Table(name, selector(), selector(), 1, 0, free, [], None))
        checkpointer = None
        if self._directory is not None:
            written = checkpoints.prepare(self._directory)
            fallback = None if first is None else str(first)  # what it loads, as written is empty
            checkpointer = reverb.create_default_checkpointer(str(written), "", fallback)
        self._server = reverb.Server(tables, self.port, checkpointer)
        restrict_listeners(self.port, self._bind_address)
        self._client: binding.Client = reverb.Client(self.address)
        if cfg.sampler == "prioritized" and not table_infos(self._client, 5)[LARGEST_PRIORITY].size:
            put_number(self._client, LARGEST_PRIORITY, 1.0)
        if is_batched(cfg, self._packing.step_bytes):
            self._batches = BatchService(
                self._client, self.address, self._packing, cfg, self._bind_address
            )

    def restore(self, files: PyTree) -> None:
        """Restarts with the contents of a checkpoint, given as the bytes of its files by name.

        Clients in other processes reconnect within seconds; waiting calls continue to wait.
        """
        if self._directory is None:
            raise ValueError(
                "ReverbServer.restore: a checkpoint_dir must be given at construction; got none."
            )
        self._stop()
        with tempfile.TemporaryDirectory(dir=self._directory.parent) as scratch:
            for name, content in files.items():
                np.asarray(content, np.uint8).tofile(Path(scratch) / name)
            self._start(Path(scratch))

    def _stop(self) -> None:
        if self._server is None:
            return
        if self._batches is None:
            self._server.Stop()
        else:
            self._batches.close(self._server.Stop)
        self._server = self._batches = None
        self._client = None  # type: ignore[assignment]

    def close(self) -> None:
        """Stops serving; takes 5 s while clients are connected. A second call does nothing."""
        self._stop()


def _free_port(port: int | None) -> int:
    """Returns an unused port, because two Reverb servers would share a port without an error."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        # Closed connections may remain on a port for a while; only listeners count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port or 0))
        except OSError as error:
            raise ValueError(
                f"ReverbServer: port must be free; got {port}: {error}. Pass None for any free one."
            ) from None
        return int(probe.getsockname()[1])


class BatchService:
    """Serves batches that are sampled in the Reverb server's process.

    Sampling starts at the first call. From then on the next batch is sampled while the last one is
    sent. If a reader asks for a batch and does not fetch it, the next reader receives it.
    """

    def __init__(
        self,
        client: binding.Client,
        address: str,
        packing: Packing,
        cfg: ReplayConfig,
        bind_address: str,
    ):
        """Begins to serve.

        Args:
          client: a client in the server's process.
          address: the server's address.
          packing: the packing of the items.
          cfg: the rules of the table.
          bind_address: the address to listen on; see `rlstack.rpc.socket_filter`.
        """
        self._client: binding.Client | None = client
        self._address, self._packing, self._cfg = address, packing, cfg
        self._lock, self._closed = threading.Lock(), False
        self._maker: BatchMaker | None = None
        self._server = serve(self, BATCHES, bind_address=bind_address)
        put_number(client, BATCH_PORT, int(self._server.address.rsplit(":", 1)[1]))

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


class BatchMaker(Fetcher):
    """A thread of the server's process that samples batches while fewer are ready than are wanted.

    One thread samples and lays out batches. Two threads would compete for the interpreter, because
    sampling releases and acquires it for each item.
    """

    def __init__(self, client: binding.Client, address: str, packing: Packing, cfg: ReplayConfig):
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


class AlternatingSamplers:
    """Samples items in the server's own process, alternating between several samplers.

    In the server's process a sampler fills its queue in one burst. It starts the next burst only
    when the last item of the previous burst has been taken. So the reader of one sampler and that
    sampler's thread always wait for each other. With two samplers both work at the same time, if
    the reader switches to the other sampler at the end of a burst: 0.20 ms for 128 small items
    instead of 0.38 (two cores). Reverb's constants determine where bursts end, if there is always
    another item to sample. With other constants, switching would help less but do no harm.
    """

    def __init__(self, client: binding.Client, prefetch: int, samplers: int):
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

    def take(self, count: int) -> list[binding.RawItem]:
        """Returns ``count`` items; waits for them without the interpreter's lock."""
        items: list[binding.RawItem] = []
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
