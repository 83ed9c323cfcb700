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
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import LOOK_PERIOD, ReplayClosedError, ReplayTimeoutError, Sample, as_logs
from rlstack.replay.memory import check_memory
from rlstack.replay.samplers import Fifo
from rlstack.replay.shared_memory.block import FOLDER, Block, start_time
from rlstack.replay.shared_memory.flow_control import Ids, PollingWait
from rlstack.replay.shared_memory.steps import (
    ASKED,
    CLOSED,
    DEAD,
    INSERTS,
    NEWS,
    OWNER_PID,
    OWNER_START,
    SAMPLES,
    SIZE,
    STARVED,
    SharedSteps,
    memory_fence,
    total_bytes,
)
from rlstack.replay.shared_memory.writer import NAME, SharedMemHandle, SharedMemWriter
from rlstack.replay.storage import StepRing
from rlstack.replay.table import ItemTable
from rlstack.types import Logs, PyTree, Transition

if TYPE_CHECKING:  # imported by tables with an item processor
    from rlstack.replay.episodes import Change

_CHECK_PERIOD = 1.0  # seconds between two checks that the writers are alive
_REDRAWS = 100  # attempts to replace items that were overwritten during the copy

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
        spec = jax.tree.map(_as_spec, spec)
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

    def sample_batches(self, batch_size: int, most: int, timeout: float | None = None) -> Sample:
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

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items; ignores items no longer held."""
        with self._lock:
            self._check_open("write_back")
            self._table.write_back(keys, updates)

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


def _as_spec(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns a leaf's spec, without its values."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype))


def _end(block: Block, head: np.ndarray, owner: int) -> None:
    """Marks the buffer as closed for the writers, and removes the block's name."""
    if os.getpid() == owner:
        head[CLOSED] = 1
        block.unlink()


class SharedMemReader:
    """Inserts the writers' published items into the table, and publishes the table's counts.

    It takes no lock and never waits.

    Attributes:
      asked: the batch size of the last refused request; None if the last request was granted.
      redrawn: number of items drawn again because they were overwritten during the copy.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int, shared: SharedSteps, table: ItemTable):
        """Makes the table use the shared steps."""
        self._cfg, self._num_envs = cfg, num_envs
        self._shared, self._numbers, self._table = shared, shared.counters, table
        table.ring = shared.ring
        table.counter.separate()
        self._steps_held = table.items * cfg.step_period + cfg.unroll_length
        # A sampler and an item processor need to know where episodes were broken off.
        self._knows_breaks = bool(cfg.sampler_factory or cfg.item_processor)
        self._changed = True  # whether the table has changed since the last `publish`
        self._published: tuple[int, ...] = ()
        self.asked: int | None = None
        self.redrawn = 0

    def poll(self) -> None:
        """Inserts the items completed since the last call."""
        table, cfg = self._table, self._cfg
        steps, seen = self._numbers.steps.copy(), table.counter.steps
        if np.count_nonzero(steps == seen) == len(seen):
            return
        memory_fence()
        if self._knows_breaks:
            table.counter.unbroken[:] = self._numbers.unbroken
        first, last = self._items_ended(seen), self._items_ended(steps)
        if cfg.sampler != "fifo":  # writers do not wait, and may have overwritten unseen items
            oldest = np.maximum(first, last - table.items)
            table.inserts += int((oldest - first).sum())  # counted as unbroken, but already lost
            first = oldest
        indices = first + np.arange((last - first).max())[:, None]
        if len(indices):
            ends = indices * cfg.step_period + cfg.unroll_length
            inside = indices < last
            keys = (indices * self._num_envs + table.counter.envs)[inside]
            marks = self._shared.marks[ends % table.ring.rows, table.counter.envs]
            unbroken = (marks == ends + 1)[inside]
            if cfg.sampler == "fifo":  # a broken item replaces no older one
                keys = keys[unbroken]
            if keys.size:
                table.insert(keys, None if cfg.sampler == "fifo" else unbroken)
        seen[:] = steps
        self._changed = True

    def _items_ended(self, steps: np.ndarray) -> np.ndarray:
        """Returns the number of items that end before these steps, including broken ones."""
        ended = (steps - 1 - self._cfg.unroll_length) // self._cfg.step_period + 1
        return np.maximum(ended, 0)

    def publish(self) -> None:
        """Publishes the table's counts, and then the steps that the counts include."""
        table, numbers = self._table, self._numbers
        news = (table.samples, table.sampler.size, *numbers.head[[ASKED, STARVED]].tolist())
        if not self._changed and news == self._published:
            return
        self._published = news
        numbers.head[SAMPLES] = table.samples
        numbers.head[SIZE], numbers.head[INSERTS] = table.sampler.size, table.inserts
        if isinstance(table.sampler, Fifo):
            released = self._items_ended(table.counter.steps) * self._cfg.step_period
            starts, env_ids = table.locate(table.sampler.queued())
            released[env_ids[::-1]] = starts[::-1]  # the oldest item's start is written last
            numbers.released[:] = released
        memory_fence()
        numbers.seen[:] = table.counter.steps
        memory_fence()
        numbers.head[NEWS] += 1
        self._changed = False

    def blocking_rule(self, size: int) -> str:
        """Polls; returns the name of the rule that blocks a sample now, or ""."""
        self.poll()
        rule = self._table.blocking_rule(size)
        self._answer(size, rule)
        if rule and self.drop_oldest():
            rule = self._table.blocking_rule(size)
            self._answer(size, rule)
        self.publish()
        return rule

    def _answer(self, size: int, rule: str) -> None:
        self.asked = size if rule else None
        head = self._numbers.head
        head[ASKED], head[STARVED] = self.asked or 0, rule not in ("", "samples_per_insert")

    def update_refusal(self) -> None:
        """Updates the last refusal, for a writer in the reader's own thread."""
        if self.asked is not None:
            rule = self._table.blocking_rule(self.asked)
            self._numbers.head[STARVED] = rule not in ("", "samples_per_insert")

    def drop_oldest(self, waits: np.ndarray | bool = False) -> bool:
        """Drops the oldest fifo items if all writers wait while no batch can be drawn.

        Rounds drop nothing: the next round takes all items. An actor that has reported counts as a
        writer that waits, because it adds nothing more until it has newer params.

        Args:
          waits: environments with a writer that waits and has not published this, [num_envs] bool.
            Their writer's thread may be the reader's own, so a round would not help it.

        Returns:
          Whether items were dropped, or a round may now be drawn.
        """
        table, numbers, sampler = self._table, self._numbers, self._table.sampler
        if not isinstance(sampler, Fifo) or self.asked is None:
            return False
        self.publish()
        # A writer that has seen the newest NEWS and still waits is blocked until something changes.
        waiting = (numbers.blocked == 1 + numbers.head[NEWS]) | waits
        if not (waiting | (numbers.blocked == DEAD) | table.has_reported()).all():
            return False
        if table.in_rounds and not waiting.any():  # the others may still report
            return False
        memory_fence()
        self.poll()
        if self._changed:  # they added steps before they began to wait, and must check again
            self.publish()
            return False
        keys = sampler.queued().copy()
        if not keys.size or not table.blocking_rule(self.asked):
            return False
        if table.in_rounds and waits is False:
            table.take_full_round()
            return True
        starts, env_ids = table.locate(keys)
        full = table.counter.steps[env_ids] >= starts + self._steps_held
        keys = keys[full] if full.any() else keys[: self._num_envs]
        sampler.remove(keys % len(sampler.key_at))
        sampler.dropped += len(keys)
        self.publish()
        return True

    def find_dead(self) -> None:
        """Marks the environments of writers that have ended."""
        numbers = self._numbers
        for pid in np.unique(numbers.pid[numbers.pid != 0]):
            ended = numbers.start_time != start_time(int(pid))
            numbers.blocked[(numbers.pid == pid) & ended] = DEAD

    def take(self, size: int, most: int | None = None) -> Sample | None:
        """Draws and copies batches; call it only when no rule blocks one.

        Args:
          size: items in each.
          most: the largest number of batches; the sample then has a leading axis of those that the
            rules allow. None: one batch, without this axis.

        Returns:
          The sample; None if writers kept overwriting the drawn items.
        """
        table, reserved = self._table, self._numbers.reserved
        if most is None:
            keys, relative_probs = table.draw(size)
        else:
            keys, relative_probs = table.draw_batches(size, table.num_ready(size, most))
        starts, env_ids = table.locate(keys)
        trajectory = table.ring.gather(starts, env_ids)
        shape = keys.shape
        keys, relative_probs = keys.ravel(), relative_probs.ravel()
        starts, env_ids = starts.ravel(), env_ids.ravel()
        changes: list[Change] = []
        # A fifo's items stay until `publish` releases them.
        unchecked = np.arange(keys.size if self._cfg.sampler != "fifo" else 0)
        for _ in range(_REDRAWS):
            memory_fence()
            # The items copied in the last pass that have been overwritten since.
            unchecked = unchecked[
                reserved[env_ids[unchecked]] > starts[unchecked] + table.ring.rows
            ]
            if table.processing is not None and not unchecked.size:
                at = starts.reshape(shape), env_ids.reshape(shape)
                changes, oldest = table.process(trajectory, *at)
                memory_fence()
                oldest_rows = oldest.ravel() + table.ring.rows
                unchecked = np.flatnonzero(reserved[env_ids] > oldest_rows)
            if not unchecked.size:
                for values, new in changes:
                    values[...] = new
                sample = table.finish(
                    keys.reshape(shape), relative_probs.reshape(shape), trajectory
                )
                self.publish()
                return sample
            self.redrawn += unchecked.size
            self.poll()
            if not table.sampler.ready(unchecked.size):
                return None
            keys[unchecked], relative_probs[unchecked] = table.sampler.draw(unchecked.size)
            starts[unchecked], env_ids[unchecked] = table.locate(keys[unchecked])
            table.ring.gather_again(trajectory, unchecked, starts[unchecked], env_ids[unchecked])
        return None

    def save(self) -> PyTree:
        """Returns the whole state, except items that are overwritten during the call."""
        self.poll()
        table, numbers = self._table, self._numbers
        table.counter.unbroken[:] = numbers.unbroken
        rings = self._shared.save(table.counter.steps, self._cfg)
        memory_fence()
        held = table.sampler.key_at[table.sampler.key_at >= 0]
        starts, env_ids = table.locate(held)
        lost = held[numbers.reserved[env_ids] > starts + table.ring.rows]
        if self._cfg.sampler != "fifo" and lost.size:
            table.sampler.remove(lost % len(table.sampler.key_at))
        return table.save(rings)

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned; call it before any process writes."""
        table, numbers = self._table, self._numbers
        table.load(tree)
        table.counter.separate()
        self._shared.load(tree["steps"], table.counter.steps, self._cfg)
        numbers.unbroken[:] = table.counter.unbroken
        numbers.reserved[:] = numbers.steps[:] = table.counter.steps
        numbers.pid[:] = 0
        self.asked, self._changed = None, True
        self.publish()
