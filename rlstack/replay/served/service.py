"""The service that holds a replay table, and answers calls of writers and of a reader.

The table is that of the other backends (`rlstack.replay.table`), and so are its rules for waiting
(`rlstack.replay.shared_memory`): each writing process has a writer here. Steps and batches cross
the network as flat lists of arrays, so this process needs no class of an agent. A message to the
service has many steps, and a message from it has whole batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import ReplayTimeoutError
from rlstack.replay.served import table_files
from rlstack.replay.served.sessions import Sessions
from rlstack.replay.shared_memory import SharedMemReplayBuffer
from rlstack.rpc import remote
from rlstack.types import Logs, PyTree, Transition

MOST_BATCHES = 8  # largest number of batches in one message
_LONGEST_WAIT = 2.0  # seconds that a call may wait, so that few threads of the transport do


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
            self._buffer.load(table_files.read(Path(start_from), self._layout, target))
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
            sample = self._buffer.sample_several(
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
        return str(table_files.write(self._directory, self._layout, self._buffer.save()))

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
