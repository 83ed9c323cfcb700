"""Replay on a Reverb server, for actors and learners on any machines.

Cassirer et al. 2021, https://arxiv.org/abs/2102.04736. Differences from the other backends:

- A new item replaces the oldest of *all* environments; ``max_size_per_env`` limits only the total.
- Sampling uses the server's random generator, which takes no seed.
- ``max_size`` does not include items that are being sent to the server (``max_pending`` of each
  writer) and items that are sampled ahead (``prefetch`` of the reader). Priorities and
  ``samples_per_insert`` treat items sampled ahead as sampled. Set both to 0 if exactness matters
  more than speed.
- With ``max_times_sampled``, ``can_sample`` may return True although items have been replaced
  since; ``sample`` then waits.
- A full fifo makes writers wait; a fifo with ``samples_per_insert`` drops its oldest items.
- ``add`` waits for readers even if the only reader is the same thread. Such a thread must sample
  until ``can_sample`` is False before it adds again.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import LOOK_PERIOD, ReplayClosedError, ReplayTimeoutError, Sample, as_logs
from rlstack.replay.reverb.client import SharedMaxima
from rlstack.replay.reverb.packing import Packing
from rlstack.replay.reverb.reader import ReverbReader
from rlstack.replay.reverb.server import ReverbServer
from rlstack.replay.reverb.table_config import capacity, default_prefetch
from rlstack.replay.reverb.writer import ReverbWriter
from rlstack.replay.served import checkpoints
from rlstack.types import Logs, PyTree, Transition

__all__ = ["ReverbReplayBuffer", "ReverbServer"]

_SETTLE = 0.5  # seconds within which a table that is not full accepts items


class ReverbReplayBuffer:
    """A ``ReplayBuffer`` with its items on a server; `ReplayBuffer` documents the methods.

    It connects when it first writes or reads. It can be pickled at any time; the copy makes its own
    connection. Writers and readers may be different processes. A process that has connected must
    not fork, because Reverb hangs in the child; spawn processes instead.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        server: ReverbServer | str,
        spec: Transition,
        *,
        env_ids: range | None = None,
        num_actors: int = 1,
        prefetch: int | None = None,
        max_pending: int = 32,
    ):
        """Stores the arguments; the first use connects.

        Args:
          cfg: the rules of the table, the same as the server's.
          num_envs: number of environments of all actors together.
          server: the server's address ``host:port``, or the server itself. With the server itself,
              this process must be its only user: ``make_dataset`` ends when no items are left to
              sample, and ``load`` works.
          spec: shapes and dtypes of one environment's step, from
            `rlstack.acting.actor.transition_spec`.
          env_ids: ids of the environments of this process, which adds their steps; None for all.
          num_actors: number of actors, needed for rounds. Actors share the environments evenly.
          prefetch: number of items that Reverb's threads sample ahead, in addition to one batch
              that is kept ready. 0: items are sampled only on request. None: `default_prefetch`.
              For small items, which are sent in batches, the server also samples ahead:
              `server_prefetch`.
          max_pending: number of this writer's items that may be unsent or in transit; 0 makes every
              ``add`` wait until its items are in the table.
        """
        ids = range(num_envs) if env_ids is None else env_ids
        if ids.step != 1 or not 0 <= ids.start < ids.stop <= num_envs:
            raise ValueError(
                f"ReverbReplayBuffer: env_ids must be a range of step 1 within 0..{num_envs - 1}; "
                f"got {ids}."
            )
        prefetch = default_prefetch(cfg) if prefetch is None else prefetch
        if prefetch < 0 or max_pending < 0:
            raise ValueError(
                "ReverbReplayBuffer: prefetch and max_pending must be at least 0; got "
                f"{prefetch} and {max_pending}."
            )
        self._cfg, self._num_envs, self.spec = cfg, num_envs, spec
        self._server = server if isinstance(server, ReverbServer) else None
        self.address = server.address if isinstance(server, ReverbServer) else server
        self._env_ids, self._num_actors = ids, num_actors
        self._prefetch, self._max_pending = prefetch, max_pending
        self._lock, self._closed = threading.Lock(), False
        self._maxima = SharedMaxima()
        self._writing: ReverbWriter | None = None
        self._reading: ReverbReader | None = None

    def __reduce__(self) -> tuple:
        make = functools.partial(
            ReverbReplayBuffer,
            env_ids=self._env_ids,
            num_actors=self._num_actors,
            prefetch=self._prefetch,
            max_pending=self._max_pending,
        )
        return make, (self._cfg, self._num_envs, self.address, self.spec)

    def _writer(self, where: str) -> ReverbWriter:
        """Returns the writing half; connects it if needed."""
        with self._lock:
            self._check_open(where)
            if self._writing is None:
                self._writing = ReverbWriter(
                    self._cfg,
                    self._env_ids,
                    Packing(self.spec),
                    self.address,
                    max_pending=self._max_pending,
                    maxima=self._maxima,
                    closed=lambda: self._closed,
                )
            return self._writing

    def _reader(self, where: str) -> ReverbReader:
        """Returns the reading half; connects it if needed."""
        with self._lock:
            self._check_open(where)
            if self._reading is None:
                self._reading = ReverbReader(
                    self._cfg,
                    self._num_envs,
                    Packing(self.spec),
                    self.address,
                    prefetch=self._prefetch,
                    num_actors=self._num_actors,
                    maxima=self._maxima,
                    closed=lambda: self._closed,
                )
            return self._reading

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"ReverbReplayBuffer.{where}: the buffer is closed.")

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; None for all of this writer's."""
        seconds = self._cfg.timeout_seconds if timeout is None else timeout
        (self._writing or self._writer("add")).add(env_ids, transition, seconds)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step starts new ones."""
        self._writer("gap").gap(env_ids)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all completed items are in the table.

        A buffer that was made with the server itself also waits until a batch has been fetched, if
        there are enough items, so that ``can_sample`` is True. Call it before a pause in adding.
        Otherwise the last items of overlapping windows may not be sent until the steps that share
        their chunk are added.

        Raises:
          ReplayTimeoutError: the wait exceeded the timeout; the items are still being sent.
        """
        self._writer("flush").flush(self._cfg.timeout_seconds if timeout is None else timeout)
        if self._server is not None and self._prefetch:
            self._reader("flush").await_fetch()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now; with prefetching, without asking the server."""
        return not self._closed and self._reader("can_sample").can_sample(batch_size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items, or a round; waits while a rule blocks it."""
        return self._reader("sample").sample(batch_size, timeout)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; with prefetching, in the background."""
        self._reader("update_priorities").update_priorities(keys, priorities)

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Raises a ValueError: a Reverb server changes no stored steps."""
        raise ValueError(
            "ReverbReplayBuffer.write_back: stored steps must stay as they are, because a Reverb "
            "server cannot change them. Use --replay.service table."
        )

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params."""
        self._maxima.set_version(int(version))

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until ``close``, or until ``stop`` returns True.

        A buffer that was made with the server itself yields samples only while ``can_sample``.
        """
        while not self._closed and (stop is None or not stop()):
            if self._server is not None and not self._will_sample():
                return
            try:
                sample = self.sample(timeout=None if stop is None else LOOK_PERIOD)
            except ReplayTimeoutError:
                if stop is None:
                    raise
                continue
            except ReplayClosedError:
                if self._closed:
                    return
                raise
            yield sample

    def _will_sample(self) -> bool:
        """Whether a batch can be sampled, with items on their way; for the server's only user."""
        reader = self._reader("make_dataset")
        if reader.await_fetch():
            return True
        if self._writing is None:
            return False
        # A table without a batch cannot be full, so it accepts the items at once.
        with contextlib.suppress(ReplayTimeoutError):
            self._writing.flush(_SETTLE)
        return reader.await_fetch()

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds of waiting, and the last batch's lag."""
        logs = self._reader("stats").stats()
        assert self._reading is not None
        added = 0.0 if self._writing is None else self._writing.waited
        return logs | as_logs(add_wait_seconds=added, sample_wait_seconds=self._reading.waited)

    def checkpoint(self, *, keep: int | None = 1) -> str:
        """Makes the server write a checkpoint; returns its path on the server's machine.

        A server that starts with the same ``checkpoint_dir`` loads the newest checkpoint. The
        directory must be visible here at the same path; otherwise Reverb itself keeps one
        checkpoint, the one with the latest time in its name.

        Args:
          keep: number of checkpoints to keep; None for all.

        Raises:
          ValueError: the server has no ``checkpoint_dir``.
          ReplayCheckpointError: the server could not write it, for example because the disk is
            full.
          ReplayTimeoutError: the server does not answer.
        """
        path = Path(self._reader("checkpoint").checkpoint())
        if path.parent.name != checkpoints.WRITTEN or not path.is_dir():
            return str(path)
        directory = path.parent.parent
        path = checkpoints.take(directory, path)
        if keep is not None:
            kept = {p.name for p in checkpoints.numbered(directory)[-keep:]}
            checkpoints.keep_only(directory, kept, unnumbered_too=True)
        return str(path)

    def save(self) -> PyTree:
        """Returns the server's checkpoint, file by file, and the state of both halves.

        With prefetching, the checkpoint lacks up to ``prefetch`` items of a fifo.

        Raises:
          ValueError: the checkpoint is on another machine or does not exist.
        """
        reader, tree = self._reader("save"), {}
        if self._writing is not None:
            tree["writer"] = self._writing.save()
        tree["reader"] = reader.save()
        path = reader.checkpoint()
        tree["server"] = _read_files(path)
        shutil.rmtree(path)  # Reverb's directory must be empty before its next checkpoint
        tree["table"] = self._table()
        return tree

    def _table(self) -> np.ndarray:
        """Returns the sizes that must be equal in a saved table and this one, [4] int64."""
        cfg, step = self._cfg, Packing(self.spec, with_head=False).step_bytes
        sizes = [self._num_envs, capacity(cfg, self._num_envs), cfg.unroll_length, step]
        return np.array(sizes, np.int64)

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned; the server restarts.

        Raises:
          ValueError: this buffer was made with an address, or the saved table differs.
        """
        if self._server is None:
            raise ValueError(
                "ReverbReplayBuffer.load: the buffer must be made with the server itself, which is "
                f"restored; got its address {self.address}. Load in the server's process, or start "
                "the server with the checkpoint_dir of a checkpoint."
            )
        if not np.array_equal(tree["table"], self._table()):
            raise ValueError(
                "ReverbReplayBuffer.load: (environments, items, unroll_length, bytes a step) must "
                f"be {self._table().tolist()}; got a saved {tree['table'].tolist()}. Load into an "
                "equal config."
            )
        with self._lock:
            self._check_open("load")
            self._disconnect()
            self._server.restore(tree["server"])
        self._reader("load").load(tree["reader"])
        if "writer" in tree:
            self._writer("load").load(tree["writer"])

    def _disconnect(self) -> None:
        halves, self._reading, self._writing = (self._writing, self._reading), None, None
        for half in halves:
            if half is not None:
                half.close()

    def close(self) -> None:
        """Disconnects and ends all waits; the server keeps running. A second call does nothing."""
        self._closed = True
        for half in (self._writing, self._reading):
            if half is not None:
                half.close()


def _read_files(path: str) -> dict[str, np.ndarray]:
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(
            f"ReverbReplayBuffer.save: the server's checkpoint must be readable here; got {path}, "
            "which is not. Start a server with that checkpoint_dir instead of calling load."
        )
    return {file.name: np.fromfile(file, np.uint8) for file in sorted(folder.iterdir())}
