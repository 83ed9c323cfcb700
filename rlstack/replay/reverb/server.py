"""The Reverb server that holds one table, and what its clients may ask it."""

from __future__ import annotations

import math
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlstack.replay.base import ReplayClosedError, ReplayConfig, ReplayTimeoutError
from rlstack.replay.reverb import binding
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.rules import ENDLESS, TableInfo, capacity, is_whole, limits
from rlstack.types import PyTree, Transition

ITEMS = "items"
LARGEST_PRIORITY = "largest_priority"  # a table of one item, which writers ask now and then


class ReverbServer:
    """A table behind a port, in this process.

    It listens on all interfaces, without authentication: that is Reverb's way.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        spec: Transition,
        *,
        port: int | None = None,
        checkpoint_dir: str | Path | None = None,
    ):
        """Starts to serve.

        Args:
          cfg: the table.
          num_envs: environments that write, of all actors together.
          spec: of one environment's step (`rlstack.actor.transition_spec`).
          port: to listen on; None for a free one.
          checkpoint_dir: where checkpoints are kept. If there is one, the table begins with its
            contents. None: no checkpoints, no ``save``.

        Raises:
          ValueError: somebody listens on the port, or the checkpoint is of another table.
          ImportError: Reverb is not installed.
        """
        self._reverb = binding.load()
        self._cfg, self._num_envs = cfg, num_envs
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        step_bytes = Packing(spec).step_bytes
        length = cfg.unroll_length + 1
        steps = length if is_whole(cfg, step_bytes) else min(length, cfg.step_period)
        self.max_bytes = capacity(cfg, num_envs) * steps * step_bytes  # before compression
        self.port = _free_port(port)
        self.address = f"localhost:{self.port}"
        self._server: Any = None
        self._start()

    def _start(self) -> None:
        reverb, cfg = self._reverb, self._cfg
        sampler = {
            "fifo": reverb.FifoSelector,
            "uniform": reverb.UniformSelector,
            "prioritized": lambda: reverb.PrioritizedSelector(cfg.priority_exponent),
        }[cfg.sampler]()
        # min_size counts inserts, Reverb's counts items held: readers see to it.
        limit = limits(cfg, self._num_envs)
        limiter = reverb.RateLimiter(limit.samples_per_insert, 1, limit.min_diff, limit.max_diff)
        size = capacity(cfg, self._num_envs)
        # A fifo's items go to the reader once; if they may be in more batches, it repeats them.
        times = 1 if cfg.sampler == "fifo" else cfg.times_limit
        selector = reverb.FifoSelector
        tables = [reverb.Table(ITEMS, sampler, selector(), size, times, limiter, [], None)]
        if cfg.sampler == "prioritized":
            free = reverb.RateLimiter(1.0, 1, -ENDLESS, ENDLESS)
            tables.append(
                reverb.Table(LARGEST_PRIORITY, selector(), selector(), 1, 0, free, [], None)
            )
        checkpointer = None
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            checkpointer = reverb.create_default_checkpointer(str(self._directory), "", None)
        self._server = reverb.Server(tables, self.port, checkpointer)
        self._client = reverb.Client(self.address)
        if cfg.sampler == "prioritized" and not _infos(self._client, 5)[LARGEST_PRIORITY].size:
            put_largest_priority(reverb, self._client, 1.0)

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
        if self._server is not None:
            self._server.Stop()
            self._server = self._client = None

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


def connect(address: str, timeout: float, closed: Callable[[], bool]) -> Any:
    """Returns a client of the server at an address, waiting for it to come up.

    Raises:
      ReplayTimeoutError: nobody answered in time.
      ReplayClosedError: ``closed`` said so meanwhile.
    """
    client = binding.load().Client(address)
    deadline = time.monotonic() + timeout
    while True:
        try:
            table_info(client, address, 1.0)
            return client
        except ReplayTimeoutError:
            if closed():
                raise ReplayClosedError("ReverbReplayBuffer: the buffer is closed.") from None
            if time.monotonic() > deadline:
                raise


def table_info(client: Any, address: str, timeout: float) -> TableInfo:
    """Asks for the table's counters.

    Raises:
      ReplayTimeoutError: the server did not answer in time.
    """
    try:
        return _infos(client, timeout)[ITEMS]
    except RuntimeError as error:
        raise ReplayTimeoutError(
            f"ReverbReplayBuffer: the Reverb server at {address} must answer; it did not within "
            f"{timeout:.0f} s ({error}). Is it running, and is the address right?"
        ) from None


def _infos(client: Any, timeout: float) -> dict[str, TableInfo]:
    infos = {}
    for message in client.ServerInfo(max(1, math.ceil(timeout))):
        fields = _parse(message)
        limiter = _parse(fields.get(5, b""))
        infos[bytes(fields[8]).decode()] = TableInfo(
            int(fields.get(7, 0)), *(_parse(limiter.get(i, b"")).get(2, 0) for i in (5, 6))
        )
    return infos


def _parse(message: bytes) -> dict[int, Any]:
    """Reads a protocol buffer's fields: bytes for messages, ints for varints; last one counts.

    The generated classes for Reverb's messages import TensorFlow.
    """
    fields: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            fields[number] = varint()
            continue
        size = {1: 8, 5: 4}[kind] if kind != 2 else varint()
        fields[number] = message[at : at + size]
        at += size
    return fields


def put_largest_priority(reverb: Any, client: Any, priority: float) -> None:
    """Tells all writers the largest priority given so far."""
    writer = client.NewTrajectoryWriter(reverb.ConstantChunkerOptions(1, 1), 3000)
    refs = writer.Append([np.float64(priority)])
    writer.CreateItem(LARGEST_PRIORITY, 1.0, [[refs[0]]], [True])
    writer.Flush(0, 5000)
    writer.Close()


def get_largest_priority(client: Any) -> float:
    """Asks for the largest priority; blocks while the server is away."""
    sampler = client.NewSampler(LARGEST_PRIORITY, 1, 1)
    return float(sampler.GetNextTrajectory()[4])
