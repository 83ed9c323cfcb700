"""Replay in memory that the processes of one machine share.

The process that samples, usually the learner's, owns the buffer: it alone holds the items and the
sampler, as an `InProcessReplay` does. Writers share with it only the steps and a few counters (see
``steps``), so they need no lock, neither among each other nor against the reader.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator

import jax
import numpy as np

from rlstack.replay.backoff import Backoff
from rlstack.replay.base import ReplayClosedError, ReplayConfig, Sample, as_logs
from rlstack.replay.room import check_room
from rlstack.replay.shared_memory.block import FOLDER, Block, birth
from rlstack.replay.shared_memory.handle import NAME, SharedMemHandle
from rlstack.replay.shared_memory.reader import SharedMemReader
from rlstack.replay.shared_memory.steps import (
    CLOSED,
    OWNER_BIRTH,
    OWNER_PID,
    SharedSteps,
    total_bytes,
)
from rlstack.replay.shared_memory.writer import SharedMemWriter
from rlstack.replay.storage import StepRing
from rlstack.replay.table import Table
from rlstack.types import Logs, PyTree, Transition

_LOOK_PERIOD = 1.0  # seconds between two looks at who of the writers lives

logger = logging.getLogger(__name__)


class SharedMemReplayBuffer:
    """A ``ReplayBuffer`` for many writing processes and one that samples, with any threads.

    Learners in several processes each make a buffer, for the actors of their share.

    A full fifo makes ``add`` wait. If all writers wait and yet no batch can come together, nobody
    could end that, so the oldest items go then, and count as dropped.

    ``add`` of this object is one more writer, for one thread of the owner's. Pickled, the object
    arrives as a writer, as ``handle().attach()`` gives it.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        *,
        seed: int,
        spec: Transition,
        num_actors: int = 1,
    ):
        """Makes an empty buffer; sweeps what killed owners left in shared memory.

        Args:
          cfg: the table.
          num_envs: environments that write, of all actors; ids are in ``[0, num_envs)``.
          seed: of the sampler's own random generator.
          spec: shapes and dtypes of one environment's step, from
            `rlstack.acting.actor.transition_spec`.
          num_actors: that share the environments evenly, in order, for rounds.

        Raises:
          ValueError: the sizes contradict each other, or there is not enough memory. Nothing was
            created.
          OSError: others were quicker to take it.
        """
        if num_envs < 1:
            raise ValueError(f"{NAME}: num_envs must be at least 1; got {num_envs}.")
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)), spec)
        self._cfg, self._num_envs = cfg, num_envs
        self.num_bytes, beside = total_bytes(cfg, num_envs, spec)
        check_room(self.num_bytes + beside, NAME)
        check_room(self.num_bytes, NAME, FOLDER)
        ring = StepRing(cfg, num_envs)  # without memory until the block is there
        self._table = Table(
            NAME, cfg, num_envs, ring, seed=seed, num_actors=num_actors, drops=False
        )
        block = Block.create(self.num_bytes)
        sizes = f"{self.num_bytes:,} bytes in {FOLDER}, and {beside:,} beside"
        logger.info("%s: %s takes %s.", NAME, block.name, sizes)
        self._handle = SharedMemHandle(block.name, cfg, num_envs, spec)
        self._shared, self._pid = SharedSteps(cfg, num_envs, spec, block), os.getpid()
        head = self._shared.counters.head
        head[OWNER_PID], head[OWNER_BIRTH] = self._pid, birth(self._pid)
        self._reader = SharedMemReader(cfg, num_envs, self._shared, self._table)
        self._writer = self._local_writer()
        self._lock = threading.Lock()
        self._closed = False
        self._waited = self._added_wait = 0.0  # seconds
        self._redrawn = 0
        self._end = weakref.finalize(self, _end, block, head, self._pid)

    def _local_writer(self) -> SharedMemWriter:
        return SharedMemWriter(self._cfg, self._num_envs, self._shared, NAME, resumes=True)

    def handle(self) -> SharedMemHandle:
        """Returns what other processes need to write."""
        return self._handle

    def __reduce__(self) -> tuple:
        return SharedMemHandle.attach, (self._handle,)

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"{NAME}.{where}: the buffer is closed.")
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{NAME}.{where}: a buffer must be used by the process that made it; this is a "
                "child that it forked. Use buffer.handle().attach() there."
            )

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; waits while there is no room."""
        with self._lock:
            self._check_open("add")
            writer = self._writer
            ids, leaves = writer.prepare(env_ids, transition)
            hindered = self._hindrance(ids)
        if hindered:
            writer.wait(lambda: self._hindrance_now(ids), timeout)
        with self._lock:
            self._check_open("add")
            writer.write(ids, leaves)
            self._reader.poll()
            self._reader.publish()

    def _hindrance(self, ids: slice | np.ndarray) -> str:
        """Returns why the owner's writer must wait.

        The reader may be the same thread, and so cannot look after the writer while that waits.
        """
        self._reader.look_again()
        while (found := self._writer.obstacle(ids)) and self._reader.relieve(self._writer.mine):
            pass
        return found

    def _hindrance_now(self, ids: slice | np.ndarray) -> str:
        with self._lock:
            self._check_open("add")
            return self._hindrance(ids)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step begins afresh."""
        with self._lock:
            self._check_open("gap")
            self._writer.gap(env_ids)
            self._reader.poll()
            self._reader.publish()

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: what was added is there."""

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        size = self._cfg.batch_size if batch_size is None else batch_size
        with self._lock:
            return not self._closed and not self._reader.obstacle(size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items; waits until it can."""
        size = self._table.size_of(batch_size)
        backoff, looked = None, 0.0
        while True:
            with self._lock:
                self._check_open("sample")
                found = self._reader.obstacle(size)
                if not found and (sample := self._reader.take(size)) is not None:
                    return sample
                if backoff is None:
                    backoff = Backoff(self._cfg.timeout_seconds if timeout is None else timeout)
                elif backoff.seconds > looked + _LOOK_PERIOD:
                    looked = backoff.seconds
                    self._reader.find_dead()
            before = backoff.seconds
            goes_on = backoff.sleep()
            self._waited += backoff.seconds - before
            if not goes_on:
                raise self._table.explain(found or "items", size)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; items that left are ignored."""
        with self._lock:
            self._check_open("update_priorities")
            self._table.update_priorities(keys, priorities)

    def set_params_version(self, version: int) -> None:
        """Tells the version of the learner's params."""
        with self._lock:
            self._table.version = max(self._table.version, int(version))

    def make_dataset(self) -> Iterator[Sample]:
        """Yields samples until ``close``."""
        while True:
            try:
                sample = self.sample()
            except ReplayClosedError:
                return
            yield sample

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds waited, and the lag of the last batch's items."""
        with self._lock:
            if not self._closed:
                self._reader.poll()
                self._reader.publish()
                self._redrawn, self._added_wait = self._reader.redrawn, self._add_wait()
            return self._table.stats() | as_logs(
                redrawn=self._redrawn,
                sample_wait_seconds=self._waited,
                add_wait_seconds=self._added_wait,
            )

    def _add_wait(self) -> float:
        return float(self._shared.counters.waited.sum()) / 1e6

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays, as an `InProcessReplay` of this config would.

        Writers may go on: items they overwrite meanwhile are not saved.
        """
        with self._lock:
            self._check_open("save")
            return self._reader.save()

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned; before any other process writes.

        Raises:
          ValueError: another process writes already, or the config is another.
        """
        with self._lock:
            self._check_open("load")
            numbers = self._shared.counters
            others = np.unique(numbers.pid[(numbers.pid != 0) & (numbers.pid != self._pid)])
            others = [pid for pid in others.tolist() if birth(pid) in numbers.birth]
            if others:
                raise ValueError(
                    f"{NAME}.load: nobody else must be writing; got writers in processes "
                    f"{others!r:.100}. Load before the actors start."
                )
            self._reader.load(tree)
            self._writer = self._local_writer()

    def close(self) -> None:
        """Frees the storage and wakes everybody; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._redrawn, self._added_wait = self._reader.redrawn, self._add_wait()
            self._table.ring = StepRing(self._cfg, self._num_envs)
            self._end()
            del self._reader, self._writer, self._shared


def _end(block: Block, head: np.ndarray, owner: int) -> None:
    """Tells the writers, and takes the block's name away."""
    if os.getpid() == owner:
        head[CLOSED] = 1
        block.unlink()
