"""The Reverb server that holds one table of items."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlstack.replay.base import ReplayConfig
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
    is_whole,
    rate_limits,
)
from rlstack.rpc.socket_filter import ALL_ADDRESSES, restrict_listeners
from rlstack.types import PyTree, Transition


class ReverbServer:
    """A table behind a port, in this process.

    It knows no authentication, and by itself answers at all addresses: that is Reverb's way, and
    Courier's. Where items are better handed out by the batch (`is_batched`), it does so on a
    second, free port.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        spec: Transition,
        *,
        port: int | None = None,
        checkpoint_dir: str | Path | None = None,
        bind_address: str = ALL_ADDRESSES,
    ):
        """Starts to serve.

        Args:
          cfg: the table.
          num_envs: environments that write, of all actors together.
          spec: of one environment's step (`rlstack.acting.actor.transition_spec`).
          port: to listen on; None for a free one.
          checkpoint_dir: where checkpoints are kept. If there is one, the table begins with its
            contents. None: no checkpoints, no ``save``.
          bind_address: the address of this host to answer at, beside loopback; all by default.

        Raises:
          ValueError: somebody listens on the port, or the checkpoint is of another table.
          ImportError: Reverb is not installed.
        """
        self._reverb = binding.load()
        self._cfg, self._num_envs, self._bind_address = cfg, num_envs, bind_address
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._packing = Packing(spec)
        step_bytes = self._packing.step_bytes
        length = cfg.unroll_length + 1
        steps = length if is_whole(cfg, step_bytes) else min(length, cfg.step_period)
        self.max_bytes = capacity(cfg, num_envs) * steps * step_bytes  # before compression
        self.port = _free_port(port)
        self.address = f"localhost:{self.port}"
        self._server: Any = None
        self._batches: BatchService | None = None
        self._start()

    def _start(self) -> None:
        reverb, cfg = self._reverb, self._cfg
        sampler = {
            "fifo": reverb.FifoSelector,
            "uniform": reverb.UniformSelector,
            "prioritized": lambda: reverb.PrioritizedSelector(cfg.priority_exponent),
        }[cfg.sampler]()
        # min_size counts inserts, Reverb's counts items held: readers see to it.
        limit = rate_limits(cfg, self._num_envs)
        limiter = reverb.RateLimiter(limit.samples_per_insert, 1, limit.min_diff, limit.max_diff)
        size = capacity(cfg, self._num_envs)
        # A fifo's items go to the reader once; if they may be in more batches, it repeats them.
        times = 1 if cfg.sampler == "fifo" else cfg.times_limit
        selector = reverb.FifoSelector
        tables = [reverb.Table(ITEMS, sampler, selector(), size, times, limiter, [], None)]
        for name in (LARGEST_PRIORITY, BATCH_PORT):
            free = reverb.RateLimiter(1.0, 1, -UNLIMITED, UNLIMITED)
            tables.append(reverb.Table(name, selector(), selector(), 1, 0, free, [], None))
        checkpointer = None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            checkpointer = reverb.create_default_checkpointer(str(self._directory), "", None)
        self._server = reverb.Server(tables, self.port, checkpointer)
        restrict_listeners(self.port, self._bind_address)
        self._client = reverb.Client(self.address)
        if cfg.sampler == "prioritized" and not table_infos(self._client, 5)[LARGEST_PRIORITY].size:
            put_number(self._client, LARGEST_PRIORITY, 1.0)
        if is_batched(cfg, self._packing.step_bytes):
            self._batches = BatchService(
                self._client, self.address, self._packing, cfg, self._bind_address
            )

    def checkpoint(self) -> Path:
        """Writes a checkpoint; returns its directory. Only the newest one is kept.

        Raises:
          ValueError: the server was made without a checkpoint_dir.
        """
        if self._directory is None:
            raise ValueError(
                "ReverbServer.checkpoint: a checkpoint_dir must be given at construction; got none."
            )
        return Path(self._client.Checkpoint())

    def restore(self, files: PyTree) -> None:
        """Serves the contents of a checkpoint, given as its files' bytes by name, instead.

        Clients in other processes find the server again by themselves within seconds; calls that
        wait meanwhile go on waiting.
        """
        if self._directory is None:
            raise ValueError(
                "ReverbServer.restore: a checkpoint_dir must be given at construction; got none."
            )
        self._stop()
        # Reverb takes the newest by name, which is its time.
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        for old in self._directory.iterdir():
            shutil.rmtree(old)
        with tempfile.TemporaryDirectory(dir=self._directory.parent) as scratch:
            target = Path(scratch) / "checkpoint"
            target.mkdir()
            for name, content in files.items():
                np.asarray(content, np.uint8).tofile(target / name)
            target.rename(self._directory / f"{stamp}.000000000+00:00")
        self._start()

    def _stop(self) -> None:
        if self._server is None:
            return
        if self._batches is None:
            self._server.Stop()
        else:
            self._batches.close(self._server.Stop)
        self._server = self._client = self._batches = None

    def close(self) -> None:
        """Stops serving; takes 5 s while clients are connected. A second call does nothing."""
        self._stop()


def _free_port(port: int | None) -> int:
    """Returns a port that nobody listens on: two Reverb servers would share one unawares."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        # Connections that have ended may linger; only listeners count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port or 0))
        except OSError as error:
            raise ValueError(
                f"ReverbServer: port must be free; got {port}: {error}. Pass None for any."
            ) from None
        return int(probe.getsockname()[1])
