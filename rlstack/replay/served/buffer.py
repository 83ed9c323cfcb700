"""A replay buffer whose table is in another process, a `ReplayService`."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import LOOK_PERIOD, ReplayClosedError, ReplayTimeoutError, Sample
from rlstack.replay.memory import step_bytes
from rlstack.replay.served import checkpoints
from rlstack.replay.served.calls import NAME, Caller, ServiceCalls, own_name, unreachable
from rlstack.replay.served.reader import ServedReader
from rlstack.replay.served.service import MOST_BATCHES, layout
from rlstack.replay.served.writer import ServedWriter
from rlstack.replay.step_counter import StepCounter
from rlstack.replay.storage import StepRing
from rlstack.rpc import UnavailableError
from rlstack.types import Logs, PyTree, Transition

_PENDING = 64  # rows that wait to be sent, where items are not whole unrolls
_AHEAD_BYTES = 64 << 20  # largest size of the batches that are drawn ahead


def default_prefetch(cfg: ReplayConfig, spec: Transition) -> int:
    """Returns the number of batches that a reader draws ahead by default.

    Half of them are requested together. A request costs more than its batches if items are small,
    and on few processors its cost delays the learner. Fewer are drawn where priorities make new
    samples more valuable, and none where the params version decides which items a batch has.
    """
    if cfg.min_actors or cfg.max_staleness is not None:
        return 0
    step = step_bytes((x.shape, x.dtype) for x in jax.tree_util.tree_leaves(spec))
    most = _AHEAD_BYTES // ((cfg.unroll_length + 1) * cfg.batch_size * step)
    wanted = {"fifo": 1, "uniform": 2 * MOST_BATCHES, "prioritized": MOST_BATCHES // 2}[cfg.sampler]
    return max(1, min(wanted, most))


def default_pending(cfg: ReplayConfig, num_envs: int) -> int:
    """Returns the number of rows that a writer of some environments collects by default.

    For a fifo it is an item of each environment, because what waits here becomes stale.
    """
    return (cfg.unroll_length + 1) * num_envs if cfg.sampler == "fifo" else max(_PENDING, num_envs)


class ServedReplayBuffer:
    """A ``ReplayBuffer`` with its table in a service; `ReplayBuffer` documents the methods.

    It connects when it first writes or reads. One process may sample; any number may write.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        num_envs: int,
        service: Caller,
        spec: Transition,
        *,
        env_ids: range | None = None,
        prefetch: int | None = None,
        max_pending: int | None = None,
        alone: bool = False,
    ):
        """Stores the arguments; the first use connects.

        Args:
          cfg: the rules of the table, the same as the service's.
          num_envs: number of environments of all actors together.
          service: an `rlstack.rpc.RemoteObject` of the service, for this buffer only; ``close``
            closes it.
          spec: shapes and dtypes of one environment's step, from
            `rlstack.acting.actor.transition_spec`.
          env_ids: ids of the environments of this process, which adds their steps; None for all.
          prefetch: number of batches to draw ahead. 0: batches are drawn on request, with the
            newest params version and priorities. None: `default_prefetch`.
          max_pending: number of rows (a step of one environment) that may wait to be sent. 0: every
            ``add`` waits until its step is in the table. None: `default_pending`.
          alone: whether one thread of this process is the service's only user. It then draws and
            adds on request, its steps continue those of a loaded table, and ``load`` works.
        """
        ids = range(num_envs) if env_ids is None else env_ids
        if ids.step != 1 or not 0 <= ids.start < ids.stop <= num_envs:
            raise ValueError(
                f"{NAME}: env_ids must be a range of step 1 within 0..{num_envs - 1}; got {ids}."
            )
        prefetch = default_prefetch(cfg, spec) if prefetch is None else prefetch
        max_pending = default_pending(cfg, len(ids)) if max_pending is None else max_pending
        if prefetch < 0 or max_pending < 0:
            raise ValueError(
                f"{NAME}: prefetch and max_pending must be at least 0; got {prefetch} and "
                f"{max_pending}."
            )
        self._cfg, self._calls, self._closed = cfg, ServiceCalls(service), False
        self._reader = ServedReader(cfg, spec, self._calls, prefetch=0 if alone else prefetch)
        self._writer: ServedWriter | _OnlyWriter
        if alone:
            self._writer = _OnlyWriter(cfg, num_envs, spec, self._calls)
        else:
            form = layout(cfg, num_envs, spec)
            self._writer = ServedWriter(
                cfg, num_envs, ids, spec, self._calls, form, max_pending=max_pending
            )

    def _seconds(self, timeout: float | None) -> float:
        return self._cfg.timeout_seconds if timeout is None else timeout

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments; None for all of this writer's."""
        self._writer.add(env_ids, transition, self._seconds(timeout))

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Drops the unfinished items of these environments; the next step starts new ones."""
        self._writer.gap(env_ids, self._cfg.timeout_seconds)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all completed items are in the table.

        Raises:
          ReplayTimeoutError: the wait exceeded the timeout; the items are still being sent.
        """
        self._writer.flush(self._seconds(timeout))

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now; with prefetching, without asking the service."""
        return not self._closed and self._reader.can_sample(batch_size)

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items, or a round; waits while a rule blocks it."""
        return self._reader.sample(batch_size, timeout)

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities of items by their keys, before the next batch is requested."""
        self._reader.update_priorities(keys, priorities)

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params, before the next batch is requested."""
        self._reader.set_params_version(int(version))

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until ``close``, or until ``stop`` returns True."""
        while stop is None or not stop():
            try:
                sample = self.sample(timeout=None if stop is None else LOOK_PERIOD)
            except ReplayClosedError:
                if self._closed:
                    return
                raise
            except ReplayTimeoutError:
                if stop is None:
                    raise
                continue
            yield sample

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds of waiting, and the last batch's lag."""
        return self._reader.stats()

    def checkpoint(self, *, keep: int | None = 1) -> str:
        """Makes the service write a checkpoint; returns its path on the service's machine.

        Args:
          keep: number of checkpoints to keep, if the directory is visible here; None for all.

        Raises:
          ValueError: the service has no ``checkpoint_dir``.
          ReplayCheckpointError: the service could not write it, for example because the disk is
            full.
          ReplayTimeoutError: the service does not answer.
        """
        path = Path(self._reader.checkpoint())
        if keep is not None and path.is_dir():
            kept = {p.name for p in checkpoints.numbered(path.parent)[-keep:]}
            checkpoints.keep_only(path.parent, kept, unnumbered_too=True)
        return str(path)

    def save(self) -> PyTree:
        """Returns the service's whole state as numpy arrays."""
        return self._reader.save()

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` of this or another backend returned.

        Raises:
          ValueError: this buffer is not alone, or the saved config differs.
        """
        if not isinstance(self._writer, _OnlyWriter):
            raise ValueError(
                f"{NAME}.load: the buffer must be made with alone=True. Else start the service "
                "from a checkpoint (start_from)."
            )
        steps = jax.tree_util.tree_leaves(tree["steps"])
        seconds = self._cfg.timeout_seconds
        self._calls("load", {**tree, "steps": steps}, seconds=seconds)

    def close(self) -> None:
        """Disconnects and ends all waits; the service keeps running. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._calls.close()
        self._reader.close()


class _OnlyWriter:
    """Adds as the table's own writer, whose thread is the reader's too."""

    def __init__(self, cfg: ReplayConfig, num_envs: int, spec: Transition, calls: ServiceCalls):
        self._cfg, self._calls, self._closed = cfg, calls, False
        self._ids = StepCounter(num_envs)  # checks ids
        self._num_envs, self._checks = num_envs, StepRing(cfg, num_envs)
        leaves = jax.tree_util.tree_leaves(spec)
        self._checks.use(spec, [np.empty((1, num_envs, *x.shape), x.dtype) for x in leaves])
        self._tokens = itertools.count(secrets.randbits(60))
        self._lock = threading.Lock()

    def add(self, env_ids: np.ndarray | None, transition: Transition, timeout: float) -> None:
        """Appends one step of each of some environments."""
        self._check_open("add")
        ids = None if env_ids is None else self._ids.check_ids(f"{NAME}.add", env_ids)
        count = self._num_envs if ids is None else len(ids)
        leaves = [np.asarray(x) for x in self._checks.leaves(transition, count)]
        token, deadline = next(self._tokens), time.monotonic() + timeout
        while True:
            left = max(0.0, min(0.5, deadline - time.monotonic()))
            try:
                reason = self._calls("add", ids, leaves, left, token, seconds=left)
            except UnavailableError as error:
                reason = unreachable("add", error)
            if not reason:
                return
            self._check_open("add")
            if time.monotonic() >= deadline:
                raise ReplayTimeoutError(own_name(reason))

    def gap(self, env_ids: np.ndarray | None, timeout: float) -> None:
        """Drops the unfinished items of these environments."""
        del timeout
        self._check_open("gap")
        ids = None if env_ids is None else self._ids.check_ids(f"{NAME}.gap", env_ids)
        self._calls("break_streams", ids)

    def flush(self, timeout: float) -> None:
        """Does nothing: added steps are in the table."""

    def _check_open(self, where: str) -> None:
        if self._closed:
            raise ReplayClosedError(f"{NAME}.{where}: the buffer is closed.")

    def close(self) -> None:
        """Ends a wait in ``add``."""
        self._closed = True
