"""The service that holds a replay table, and answers calls of writers and of a reader.

The table is that of the other backends (`rlstack.replay.table`), and so are its rules for waiting
(`rlstack.replay.shared_memory`): each writing process has a writer here. Steps and batches cross
the network as flat lists of arrays, so this process needs no class of an agent. A message to the
service has many steps, and a message from it has whole batches. Each process that writes has a
`Session`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.served import checkpoints
from rlstack.replay.shared_memory import SharedMemReplayBuffer, SharedMemWriter
from rlstack.rpc import remote
from rlstack.types import Logs, PyTree, Transition

MOST_BATCHES = 8  # largest number of batches in one message
_LONGEST_WAIT = 2.0  # seconds that a call may wait, so that few threads of the transport do
# Sessions that may wait at the same time. The others try again by themselves, so that writers that
# wait do not take all threads of the transport from the reader.
_WAITING = 4


def layout(cfg: ReplayConfig, num_envs: int, spec: Transition) -> str:
    """Returns a text that is equal where the items of two tables have the same form."""
    leaves = [f"{np.dtype(x.dtype)}{list(x.shape)}" for x in jax.tree_util.tree_leaves(spec)]
    numbers = (num_envs, cfg.items_per_env(num_envs), cfg.unroll_length, cfg.step_period)
    return f"{cfg.sampler} of {numbers} (environments, items of each, T, period): {leaves}"


class ReplayService:
    """A table of items whose remote methods `ServedReplayBuffer` calls.

    Serve it with `rlstack.rpc.serve`. One process may sample; any number may write.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        *,
        seed: int,
        spec: Transition,
        num_actors: int = 1,
        checkpoint_dir: str | Path | None = None,
        start_from: str | Path | None = None,
    ):
        """Makes the table.

        Args:
          cfg: the rules of the table.
          num_envs: number of environments of all actors.
          seed: seed of the sampler's random generator.
          spec: shapes and dtypes of one environment's step, from
            `rlstack.acting.actor.transition_spec`.
          num_actors: number of actors, needed for rounds. Actors share the environments evenly and
            in order.
          checkpoint_dir: the directory of checkpoints; None for no checkpoints.
          start_from: the checkpoint to begin with; None for an empty table.

        Raises:
          ValueError: the sizes contradict each other, there is not enough memory, or the checkpoint
            is of another table.
        """
        self._layout = layout(cfg, num_envs, spec)
        self._directory = None if checkpoint_dir is None else Path(checkpoint_dir)
        self._treedef = jax.tree_util.tree_structure(spec)
        self._buffer = SharedMemReplayBuffer(
            cfg, num_envs, seed=seed, spec=spec, num_actors=num_actors, private=True
        )
        if start_from is not None:
            target = self._buffer.save()
            self._buffer.load(checkpoints.read_table(Path(start_from), self._layout, target))
        self._sessions = Sessions(self._buffer, num_envs)

    # Writing.

    @remote(idempotent=True)
    def open_writer(self, token: int, first: int, count: int, its_layout: str) -> None:
        """Makes a writer of some environments; it replaces earlier writers of any of them.

        Args:
          token: identifies the writer in later calls.
          first: the id of the writer's first environment.
          count: number of the writer's environments.
          its_layout: the `layout` of the writer's config.

        Raises:
          ValueError: the layouts differ, or there are no such environments.
        """
        if its_layout != self._layout:
            raise ValueError(
                f"ReplayService.open_writer: writer and table must have equal configs and steps; "
                f"the table has {self._layout}; got {its_layout}."
            )
        self._sessions.open(token, range(first, first + count))

    @remote(idempotent=True)
    def put(
        self,
        token: int,
        number: int,
        counts: np.ndarray,
        env_ids: np.ndarray | None,
        leaves: list[np.ndarray],
        seconds: float,
    ) -> tuple[int, str]:
        """Adds steps in order, until one must wait for longer than it may.

        Args:
          token: the writer's token, from `open_writer`.
          number: the number of this call among the writer's calls, from 1. A repeated call adds
            nothing again.
          counts: number of environments in each step, [k].
          env_ids: the environments of all steps, counted from the writer's first, [sum(counts)];
            None if each step has all of them in order.
          leaves: the steps, one after the other, ``[sum(counts), ...]``.
          seconds: longest time to wait. The call may wait for less if many writers wait.

        Returns:
          The number of steps added, and why the next one had to wait, "" if all were added.

        Raises:
          ReplayClosedError: the table is closed, or the writer was replaced.
        """
        session = self._sessions.find(token)
        return session.put(number, counts, env_ids, leaves, min(seconds, _LONGEST_WAIT))

    @remote(idempotent=True)
    def gap(self, token: int, number: int, env_ids: np.ndarray) -> None:
        """Marks a break in the streams of some of a writer's environments; see `put`."""
        self._sessions.find(token).gap(number, env_ids)

    @remote(idempotent=True)
    def close_writer(self, token: int) -> None:
        """Ends a writer; its steps stay."""
        self._sessions.close(token)

    # Sampling. ``news`` is the reader's: (params version, or -1; keys and priorities to set).

    @remote()
    def take(self, size: int, most: int, seconds: float, news: tuple) -> tuple[tuple | None, str]:
        """Draws several batches in one call.

        Args:
          size: number of items in each batch.
          most: number of batches; only the first one is waited for.
          seconds: longest time to wait.
          news: (params version, keys, priorities), applied before the draw; the version is -1
            before the first one is set.

        Returns:
          The keys, the weights, the params version and the leaves, all but the version with a
          leading axis of batches; or None, and why there is none.
        """
        self._hear(news)
        try:
            sample = self._buffer.sample_batches(
                size, min(most, MOST_BATCHES), timeout=min(seconds, _LONGEST_WAIT)
            )
        except ReplayTimeoutError as error:
            return None, str(error)
        leaves = jax.tree_util.tree_leaves(sample.batch.trajectory)
        return (sample.keys, sample.batch.weights, self._buffer.params_version, leaves), ""

    @remote(idempotent=True)
    def can_sample(self, size: int, news: tuple) -> bool:
        """Whether a batch of this size could be drawn now."""
        self._hear(news)
        return self._buffer.can_sample(size)

    @remote(idempotent=True)
    def stats(self, news: tuple) -> Logs:
        """Returns sizes, counters and seconds of waiting."""
        self._hear(news)
        return self._buffer.stats()

    @remote(idempotent=True)
    def hear(self, news: tuple) -> None:
        """Applies the reader's params version and priorities, without drawing a batch."""
        self._hear(news)

    @remote(idempotent=True)
    def write_back(self, keys: np.ndarray, given: list[int], leaves: list[np.ndarray]) -> None:
        """Writes new agent outputs into the steps of items.

        Args:
          keys: the items, [B].
          given: which leaves of an agent output are new.
          leaves: these, ``[T+1, B, ...]``.

        Raises:
          ValueError: the leaves are others than those stored.
        """
        output = self._treedef.children()[1]
        updates: list[np.ndarray | None] = [None] * output.num_leaves
        for index, leaf in zip(given, leaves, strict=True):
            updates[index] = leaf
        self._buffer.write_back(keys, output.unflatten(updates))

    def _hear(self, news: tuple) -> None:
        version, keys, priorities = news
        if version >= 0:
            self._buffer.set_params_version(version)
        for some_keys, some_priorities in zip(keys, priorities, strict=True):
            self._buffer.update_priorities(some_keys, some_priorities)

    # Checkpoints.

    @remote()
    def checkpoint(self, news: tuple) -> str:
        """Writes a checkpoint next to the earlier ones; returns its path on this machine.

        Raises:
          ValueError: there is no checkpoint_dir.
          ReplayCheckpointError: the file system refuses it; earlier checkpoints are intact.
        """
        if self._directory is None:
            raise ValueError(
                "ReplayService.checkpoint: the service must be made with a checkpoint_dir; it has "
                "none."
            )
        self._hear(news)
        return str(checkpoints.write_table(self._directory, self._layout, self._buffer.save()))

    # For a service with one user.

    @remote(idempotent=True)
    def add(
        self, env_ids: np.ndarray | None, leaves: list[np.ndarray], seconds: float, token: int
    ) -> str:
        """Adds one step as the table's own writer; returns why it had to wait, else ""."""
        if token == self._last_added:
            return ""
        step: Transition = self._treedef.unflatten(leaves)
        try:
            self._buffer.add(env_ids, step, timeout=min(seconds, _LONGEST_WAIT))
        except ReplayTimeoutError as error:
            return str(error)
        self._last_added = token
        return ""

    _last_added = -1

    @remote(idempotent=True)
    def break_streams(self, env_ids: np.ndarray | None) -> None:
        """Marks a break in the streams of some environments, as the table's own writer."""
        self._buffer.gap(env_ids)

    @remote(idempotent=True)
    def save(self, news: tuple) -> PyTree:
        """Returns the whole state, with the steps as a list of their leaves."""
        self._hear(news)
        tree: Any = self._buffer.save()
        return {**tree, "steps": jax.tree_util.tree_leaves(tree["steps"])}

    @remote(idempotent=True)
    def load(self, tree: Any) -> None:
        """Restores what ``save`` returned."""
        self._buffer.load({**tree, "steps": self._treedef.unflatten(tree["steps"])})

    def close(self) -> None:
        """Frees the table and ends all waits."""
        self._buffer.close()


class Session:
    """The steps of one writer; calls of a writer are answered one at a time."""

    def __init__(
        self,
        writer: SharedMemWriter,
        env_ids: range,
        columns: list[tuple[tuple[int, ...], np.dtype]],
        places: threading.Semaphore,
    ) -> None:
        """Stores the parts.

        Args:
          writer: the writer of these environments in the table's process.
          env_ids: consecutive ids.
          columns: shape and dtype of each leaf of one environment's step.
          places: limits the number of waiting calls; a place is held during a wait.
        """
        self._writer, self._columns, self._places = writer, columns, places
        self.env_ids = env_ids
        self._all = slice(env_ids.start, env_ids.stop)
        self._lock = threading.Lock()
        self._number, self._answer = 0, (0, "")
        self._replaced = False

    def put(
        self,
        number: int,
        counts: np.ndarray,
        env_ids: np.ndarray | None,
        leaves: list[np.ndarray],
        seconds: float,
    ) -> tuple[int, str]:
        """Adds steps; see `rlstack.replay.served.service.ReplayService.put`."""
        with self._lock:
            if not self._begin(number):
                return self._answer
            self._check(counts, env_ids, leaves)
            done = at = 0
            reason = ""
            for count in counts.tolist():
                ids = self._all if env_ids is None else self._ids(env_ids[at : at + count])
                reason = self._wait(ids, seconds)
                if reason:
                    break
                self._writer.write(ids, [leaf[at : at + count] for leaf in leaves])
                at += count
                done += 1
            self._answer = done, reason
            return self._answer

    def gap(self, number: int, env_ids: np.ndarray) -> None:
        """Breaks the streams of some environments."""
        with self._lock:
            if self._begin(number):
                self._check_ids(env_ids)
                self._writer.gap(env_ids + self.env_ids.start)

    def _begin(self, number: int) -> bool:
        """Returns whether a call is new; a call is repeated if its answer was lost."""
        self._check_open()
        if number == self._number:
            return False
        if number != self._number + 1:
            raise ValueError(
                f"ReplayService.put: calls must be numbered one by one; got {number} after "
                f"{self._number}."
            )
        self._number, self._answer = number, (0, "")
        return True

    def _check_open(self) -> None:
        if self._replaced:
            raise ReplayClosedError(
                f"ReplayService.put: environments {self.env_ids} have another writer now."
            )
        self._writer.check_open("add")

    def _check(
        self, counts: np.ndarray, env_ids: np.ndarray | None, leaves: list[np.ndarray]
    ) -> None:
        """Checks the arrays of a call; they come from another process."""
        rows, many = int(counts.sum()), len(self.env_ids)
        fits = [(rows, *shape) for shape, _ in self._columns] == [x.shape for x in leaves]
        fits = fits and [dtype for _, dtype in self._columns] == [x.dtype for x in leaves]
        fits = fits and counts.dtype.kind == "i" and bool((counts >= 0).all())
        if env_ids is None:
            fits = fits and bool((counts == many).all())
        else:
            fits = fits and env_ids.shape == (rows,)
        if not fits:
            raise ValueError(
                f"ReplayService.put: leaves must be {rows} steps like {self._columns!r:.300}; got "
                f"{[(x.shape, x.dtype) for x in leaves]!r:.300}."
            )
        if env_ids is not None:
            self._check_ids(env_ids)

    def _check_ids(self, env_ids: np.ndarray) -> None:
        many = len(self.env_ids)
        if env_ids.dtype.kind != "i" or not ((env_ids >= 0) & (env_ids < many)).all():
            raise ValueError(
                f"ReplayService.put: env_ids must be ints in 0..{many - 1}; got {env_ids!r:.200}."
            )

    def _ids(self, env_ids: np.ndarray) -> slice | np.ndarray:
        return self._writer.checked(env_ids + self.env_ids.start, "add")

    def _wait(self, ids: slice | np.ndarray, seconds: float) -> str:
        """Waits until a step may be added; returns why it may not."""
        reason = self._writer.may_write(ids, 0.0)
        if not reason or seconds <= 0 or not self._places.acquire(blocking=False):
            return reason
        try:
            return self._writer.may_write(ids, seconds)
        finally:
            self._places.release()

    def end(self, *, replaced: bool) -> None:
        """Ends the session, after a call that is running."""
        self._replaced = replaced
        with self._lock:
            if not replaced:
                self._writer.close()


class Sessions:
    """The sessions of a service, by token."""

    def __init__(self, buffer: SharedMemReplayBuffer, num_envs: int) -> None:
        """Starts without sessions."""
        self._buffer, self._num_envs = buffer, num_envs
        leaves = jax.tree_util.tree_leaves(buffer.spec)
        self._columns = [(tuple(x.shape), np.dtype(x.dtype)) for x in leaves]
        self._places = threading.BoundedSemaphore(_WAITING)
        self._lock = threading.Lock()
        self._open: dict[int, Session] = {}

    def open(self, token: int, env_ids: range) -> None:
        """Makes a session; it replaces those that have one of its environments."""
        if not 0 <= env_ids.start < env_ids.stop <= self._num_envs:
            raise ValueError(
                f"ReplayService.open_writer: environments must be within 0..{self._num_envs - 1}; "
                f"got {env_ids}."
            )
        with self._lock:
            if token in self._open:
                return
            for other, session in list(self._open.items()):
                theirs = session.env_ids
                if theirs.start < env_ids.stop and env_ids.start < theirs.stop:
                    session.end(replaced=True)
                    del self._open[other]
            writer = self._buffer.writer(env_ids)
            self._open[token] = Session(writer, env_ids, self._columns, self._places)

    def find(self, token: int) -> Session:
        """Returns a session.

        Raises:
          ReplayClosedError: the session was replaced or closed, or another service made it.
        """
        session = self._open.get(token)
        if session is None:
            raise ReplayClosedError(
                "ReplayService.put: this writer must be open; another one has its environments "
                "now, or the service was restarted."
            )
        return session

    def close(self, token: int) -> None:
        """Ends a session, if it is open."""
        with self._lock:
            session = self._open.pop(token, None)
        if session is not None:
            session.end(replaced=False)
