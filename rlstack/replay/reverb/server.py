"""The Reverb server that holds one table of items."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import numpy as np

from rlstack.configs.replay import NO_FACTORY, ReplayConfig
from rlstack.replay.reverb import binding
from rlstack.replay.reverb.batch_service import BatchService
from rlstack.replay.reverb.client import (
    BATCH_PORT,
    ITEMS,
    LARGEST_PRIORITY,
    put_number,
    table_infos,
)
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.table_config import (
    UNLIMITED,
    capacity,
    is_batched,
    rate_limits,
)
from rlstack.replay.served import checkpoints
from rlstack.rpc.socket_filter import ALL_ADDRESSES, restrict_listeners
from rlstack.types import PyTree, Transition


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
        if cfg.sampler_factory:
            raise ValueError(f"ReverbServer: sampler_factory must be empty, {NO_FACTORY}.")
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
