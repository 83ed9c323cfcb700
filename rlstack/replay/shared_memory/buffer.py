"""Replay in memory that the processes of one machine share.

The process that samples, usually the learner's, owns the buffer. Only this process holds the items
and the sampler, in the same way as an `InProcessReplay`. Writers share only the steps and a few
counters with it (see ``steps``), so neither side needs a lock.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import LOOK_PERIOD, ReplayClosedError, ReplayTimeoutError, Sample, as_logs
from rlstack.replay.memory import check_memory
from rlstack.replay.shared_memory.block import FOLDER, Block, start_time
from rlstack.replay.shared_memory.flow_control import Ids, PollingWait
from rlstack.replay.shared_memory.reader import SharedMemReader
from rlstack.replay.shared_memory.steps import (
    CLOSED,
    OWNER_PID,
    OWNER_START,
    SharedSteps,
    total_bytes,
)
from rlstack.replay.shared_memory.writer import NAME, SharedMemHandle, SharedMemWriter
from rlstack.replay.storage import StepRing
from rlstack.replay.table import ItemTable
from rlstack.types import Logs, PyTree, Transition

_CHECK_PERIOD = 1.0  # seconds between two checks that the writers are alive

logger = logging.getLogger(__name__)


class SharedMemReplayBuffer:
    """A ``ReplayBuffer`` for many writing processes and one sampling process; safe for threads.

    With several learner processes, each one makes a buffer for its share of the actors.

    A full fifo makes ``add`` wait. If all writers wait while no batch can be drawn, the oldest
    items are dropped and counted; otherwise both sides would wait forever.

    ``add`` of this object is an additional writer, for one thread of the owner. Unpickling a buffer
    gives a writer, the same as ``handle().attach()``.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        *,
        seed: int,
        spec: Transition,
        num_actors: int = 1,
        private: bool = False,
    ):
        """Makes an empty buffer; removes shared memory of killed owners.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments of all actors; ids are in ``[0, num_envs)``.
          seed: seed of the sampler's random generator.
          spec: shapes and dtypes of one environment's step, from
            `rlstack.acting.actor.transition_spec`.
          num_actors: number of actors, needed for rounds. Actors share the environments evenly and
              in order.
          private: whether only threads of this process use the buffer. Its memory is then not
            shared, and needs no space in /dev/shm.

        Raises:
          ValueError: the sizes contradict each other, or there is not enough memory. No memory was
              allocated.
          OSError: another process took the memory first.
        """
        if num_envs < 1:
            raise ValueError(f"{NAME}: num_envs must be at least 1; got {num_envs}.")
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)), spec)
        self._cfg, self._num_envs, self.spec = cfg, num_envs, spec
        self.num_bytes, reader = total_bytes(cfg, num_envs, spec)
        check_memory(self.num_bytes + reader, NAME)
        if not private:
            check_memory(self.num_bytes, NAME, FOLDER)
        ring = StepRing(cfg, num_envs)  # gets its memory from the block below
        self._table = ItemTable(
            NAME, cfg, num_envs, ring, seed=seed, num_actors=num_actors, drops=False
        )
        block = Block.private(self.num_bytes) if private else Block.create(self.num_bytes)
        where = "private" if private else f"in {FOLDER}"
        sizes = f"{self.num_bytes:,} bytes {where} and {reader:,} bytes of this process"
        logger.info("%s: %s takes %s.", NAME, block.name or "the table", sizes)
        self._handle = SharedMemHandle(block.name, cfg, num_envs, spec)
        self._shared, self._pid = SharedSteps(cfg, num_envs, spec, block), os.getpid()
        head = self._shared.counters.head
        head[OWNER_PID], head[OWNER_START] = self._pid, start_time(self._pid)
        self._reader = SharedMemReader(cfg, num_envs, self._shared, self._table)
        self._writer = self._local_writer()
        self._lock = threading.Lock()
        self._closed = False
        self._sample_wait = self._add_wait = 0.0  # seconds
        self._redrawn = 0
        self._end = weakref.finalize(self, _end, block, head, self._pid)

    def _local_writer(self) -> SharedMemWriter:
        return SharedMemWriter(self._cfg, self._num_envs, self._shared, NAME, resumes=True)

    def handle(self) -> SharedMemHandle:
        """Returns a handle with which other processes can write."""
        return self._handle

    def writer(self, env_ids: range) -> SharedMemWriter:
        """Returns the writer of some environments, for a thread of the owner.

        It replaces their earlier writer, whose steps it does not continue.
        """
        with self._lock:
            self._check_open("writer")
            writer = SharedMemWriter(self._cfg, self._num_envs, self._shared, NAME)
            writer.claim(np.arange(env_ids.start, env_ids.stop))
            return writer

    def __reduce__(self) -> tuple:
        return SharedMemHandle.attach, (self._handle,)

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"{NAME}.{where}: the buffer is closed.")
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{NAME}.{where}: only the process that made the buffer may use it; this is a "
                "forked child. Use buffer.handle().attach() there."
            )

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; waits while the buffer is full."""
        with self._lock:
            self._check_open("add")
            writer = self._writer
            ids, leaves = writer.prepare(env_ids, transition)
            rule = self._blocking_rule(ids)
        if rule:
            writer.wait(lambda: self._check_again(ids), timeout)
        with self._lock:
            self._check_open("add")
            writer.write(ids, leaves)
            self._reader.poll()
            self._reader.publish()

    def _blocking_rule(self, ids: Ids) -> str:
        """Returns the name of the rule that blocks the owner's writer, or "".

        The same thread may be the reader, and it cannot sample while it waits as a writer.
        """
        self._reader.update_refusal()
        while (rule := self._writer.blocking_rule(ids)) and self._reader.drop_oldest(
            self._writer.mine
        ):
            pass
        return rule

    def _check_again(self, ids: Ids) -> str:
        with self._lock:
            self._check_open("add")
            return self._blocking_rule(ids)

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step starts new ones."""
        with self._lock:
            self._check_open("gap")
            self._writer.gap(env_ids)
            self._reader.poll()
            self._reader.publish()

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: added steps are available immediately."""

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now."""
        size = self._cfg.batch_size if batch_size is None else batch_size
        with self._lock:
            return not self._closed and not self._reader.blocking_rule(size)

    @property
    def params_version(self) -> int:
        """The newest params version that was set, or that a drawn batch was compared with."""
        return self._table.version

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items; waits while a rule blocks it."""
        return self._sample(self._table.size_of(batch_size), None, timeout)

    def sample_several(self, batch_size: int, most: int, timeout: float | None = None) -> Sample:
        """Draws several batches at once; waits while a rule blocks the first.

        It costs little more than one batch if the items are small.

        Args:
          batch_size: items in each.
          most: number of batches; fewer are drawn if a rule would block the others.
          timeout: seconds to wait; None for the config's.

        Returns:
          The batches, as a sample with a leading axis.
        """
        return self._sample(self._table.size_of(batch_size), most, timeout)

    def _sample(self, size: int, most: int | None, timeout: float | None) -> Sample:
        wait, checked = None, 0.0
        while True:
            with self._lock:
                self._check_open("sample")
                rule = self._reader.blocking_rule(size)
                if not rule and (sample := self._reader.take(size, most)) is not None:
                    return sample
                if wait is None:
                    wait = PollingWait(self._cfg.timeout_seconds if timeout is None else timeout)
                elif wait.seconds > checked + _CHECK_PERIOD:
                    checked = wait.seconds
                    self._reader.find_dead()
            before = wait.seconds
            in_time = wait.sleep()
            self._sample_wait += wait.seconds - before
            if not in_time:
                raise self._table.explain(rule or "items", size)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys; ignores items no longer held."""
        with self._lock:
            self._check_open("update_priorities")
            self._table.update_priorities(keys, priorities)

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params."""
        with self._lock:
            self._table.version = max(self._table.version, int(version))

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until ``close``, or until ``stop`` returns True."""
        while stop is None or not stop():
            try:
                sample = self.sample(timeout=None if stop is None else LOOK_PERIOD)
            except ReplayClosedError:
                return
            except ReplayTimeoutError:
                if stop is None:
                    raise
                continue
            yield sample

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds of waiting, and the lag of the last batch's items."""
        with self._lock:
            if not self._closed:
                self._reader.poll()
                self._reader.publish()
                self._redrawn, self._add_wait = self._reader.redrawn, self._seconds_waited()
            return self._table.stats() | as_logs(
                redrawn=self._redrawn,
                sample_wait_seconds=self._sample_wait,
                add_wait_seconds=self._add_wait,
            )

    def _seconds_waited(self) -> float:
        return float(self._shared.counters.waited.sum()) / 1e6

    def save(self) -> PyTree:
        """Returns the whole state as numpy arrays, the same as an `InProcessReplay` of this config.

        Writers may continue; items that they overwrite during the call are not saved.
        """
        with self._lock:
            self._check_open("save")
            return self._reader.save()

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned; call it before any other process writes.

        Raises:
          ValueError: another process already writes, or the saved config differs.
        """
        with self._lock:
            self._check_open("load")
            numbers = self._shared.counters
            pids = np.unique(numbers.pid[(numbers.pid != 0) & (numbers.pid != self._pid)])
            others = [pid for pid in pids.tolist() if start_time(pid) in numbers.start_time]
            if others:
                raise ValueError(
                    f"{NAME}.load: no other process may be writing; got writers in processes "
                    f"{others!r:.100}. Load before the actors start."
                )
            self._reader.load(tree)
            self._writer = self._local_writer()

    def close(self) -> None:
        """Frees the storage and ends all waits; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._redrawn, self._add_wait = self._reader.redrawn, self._seconds_waited()
            self._table.ring = StepRing(self._cfg, self._num_envs)
            self._end()
            del self._reader, self._writer, self._shared


def _end(block: Block, head: np.ndarray, owner: int) -> None:
    """Marks the buffer as closed for the writers, and removes the block's name."""
    if os.getpid() == owner:
        head[CLOSED] = 1
        block.unlink()
