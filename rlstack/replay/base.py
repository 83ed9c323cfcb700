"""The interface of every replay buffer, a table of items cut from streams of steps, and its rules.

Writers add *steps*, one batch of environments at a time. Readers sample *items*: windows of
``unroll_length + 1`` consecutive steps of one environment. A step is stored once, however many
items contain it. The rules of a table (which item is sampled next, how often, and up to which age)
are those of Reverb (Cassirer et al. 2021, https://arxiv.org/abs/2102.04736), in every backend.

Sizes, inserts, samples and their ratio count items, never steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from rlstack.configs.replay import ReplayConfig
from rlstack.types import Batch, Logs, PyTree, Transition

LOOK_PERIOD = 0.2  # seconds between two calls of ``stop`` while a dataset waits for a sample


class Sample(NamedTuple):
    """One batch of items, and their keys."""

    batch: Batch  # trajectory [T+1, B, ...], weights [B] float32
    keys: np.ndarray  # [B] uint64, for update_priorities; on the host


class ReplayClosedError(RuntimeError):
    """The buffer is closed; no steps can be added and no items can be sampled any more."""


class ReplayTimeoutError(TimeoutError):
    """A call waited longer than its timeout; it neither added nor sampled anything."""


class ReplayBuffer(Protocol):
    """The interface of replay buffers: writers add steps, readers sample items.

    Waiting depends on the backend. The in-process backend never waits, because reader and writer
    may be the same thread: ``sample`` raises immediately, and a full fifo drops its oldest items.
    Backends between processes wait on both sides: ``sample`` for items, ``add`` while a fifo is
    full or while writers are ahead of samples_per_insert by more than the tolerance. Every wait
    ends after its timeout, or immediately when the buffer is closed. ``stats`` reports the total
    waiting time.
    """

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments.

        Args:
          env_ids: [n] ints, distinct, in ``[0, num_envs)``; None for all environments in order.
          transition: leaves ``[n, ...]``, with the same structure, shapes and dtypes as at the
              first call.
          timeout: longest time to wait, in seconds; None for the config's timeout.

        Raises:
          ValueError: ids or leaves do not follow these rules.
          ReplayTimeoutError: the buffer stayed full until the timeout.
          ReplayClosedError: the buffer was closed.
        """

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Marks a break: the next steps of these environments do not continue the previous ones.

        Call it when an environment was restarted or a writer lost steps, not at the end of an
        episode. Unfinished items are dropped, and no item spans the break. An item that would span
        the break still counts towards max_size_per_env, at the step where it would end.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every completed item can be sampled. Backends in memory return immediately.

        Raises:
          ReplayTimeoutError: the wait took longer than the timeout.
        """

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Returns whether ``sample`` would succeed now; fast enough to call after every step."""

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws a batch of items, or a round.

        The arrays belong to the buffer; do not write to them. They keep their values until
        ``sample`` has been called two more times. Arrays that are still referenced are kept longer,
        if only a few threads hold one batch each. A fifo batch may be a view of the storage, which
        is overwritten when ``items_per_env * period`` further steps of an environment have been
        added since its items were completed. Copy arrays that must live longer. If a device reads a
        batch asynchronously, wait for it within these limits.

        Args:
          batch_size: number of items; None for the config's batch size. Ignored for rounds.
          timeout: longest time to wait, in seconds; None for the config's timeout.

        Raises:
          ReplayTimeoutError: ``can_sample`` was False during the whole wait. The message says why
              and what to change.
          ReplayClosedError: the buffer was closed.
        """

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities ``[B]`` of items by their keys ``[B]``; ignores items no longer held.

        Samplers other than prioritized ignore the call, so that a learner need not distinguish
        them.
        """

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes new agent outputs into the steps of items; ignores items no longer held.

        Batches drawn later have them, in every item with these steps. Where items of the call share
        a step, one of them counts.

        Args:
          keys: the items, ``[B]``.
          updates: `LearnerOutput.updates`, ``[T+1, B, ...]``, with None for arrays that stay.

        Raises:
          ValueError: the arrays are others than those stored, or the backend is Reverb, whose
              server changes no stored steps.
        """

    def set_params_version(self, version: int) -> None:
        """Sets the version of the learner's params; lag and staleness are measured against it.

        Without this call, the newest version in the added steps is used.
        """

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until ``close``; in a single process, while ``can_sample``.

        Args:
          stop: the iteration ends when this function returns True. It is called before each sample,
              and every LOOK_PERIOD seconds during a wait. With ``stop``, waits have no timeout.
        """

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds waited, and the last batch's lag in params versions."""

    def save(self) -> PyTree:
        """Returns the whole state, including contents and random generator, as numpy arrays."""

    def load(self, tree: PyTree) -> None:
        """Restores what ``save`` returned; sampling continues as without an interruption."""

    def close(self) -> None:
        """Frees the storage and ends all waits and iterators; a second call does nothing."""


def as_logs(**values: ArrayLike) -> Logs:
    """Returns scalars by name, as numpy arrays."""
    return {name: np.asarray(value) for name, value in values.items()}


class Counts(NamedTuple):
    """Counters of a table and its reader."""

    inserts: int  # items inserted, ever
    samples: int  # items sampled, ever
    held: int  # items held now
    version: int  # the newest params version


def exceeds_samples_per_insert(
    cfg: ReplayConfig, inserts: int, samples: int, batch_size: int
) -> bool:
    """Whether ``batch_size`` more samples would exceed the rate limit."""
    if cfg.samples_per_insert is None:
        return False
    allowed = cfg.samples_per_insert * (inserts - cfg.min_size) + cfg.tolerance
    return samples + batch_size > allowed


def explain_rule(cfg: ReplayConfig, rule: str, batch_size: int, counts: Counts) -> str:
    """Describes a blocking rule in words, with its counters and possible remedies.

    Args:
      cfg: the rules of the table.
      rule: "min_size", "items", "round" or "samples_per_insert".
      batch_size: number of requested items.
      counts: the table's counters.
    """
    return {
        "min_size": f"{cfg.min_size} items must have been inserted (min_size); got "
        f"{counts.inserts}. Add more, or lower min_size.",
        "items": f"the table must hold enough items for batch_size ({batch_size}); got "
        f"{counts.held}. Add more, or lower batch_size.",
        "round": f"min_actors ({cfg.min_actors}) must have an item of params version "
        f"{counts.version} of each of their environments, and grace_seconds "
        f"({cfg.grace_seconds:g}) must pass or the other actors follow; got {counts.held} items in "
        "all. Add more, or lower min_actors.",
        "samples_per_insert": f"{batch_size} more than the {counts.samples} items sampled so far "
        f"would exceed samples_per_insert for {counts.inserts} inserts. Add more, or raise "
        "samples_per_insert or its tolerance.",
    }[rule]


def checked_priorities(
    where: str, keys: np.ndarray, priorities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys ``[B]`` and priorities ``[B]`` float64 as arrays.

    Raises:
      ValueError: shapes or dtypes differ, or a priority is negative or not finite.
    """
    keys, priorities = np.asarray(keys), np.asarray(priorities, np.float64)
    if keys.ndim != 1 or keys.shape != priorities.shape or keys.dtype.kind not in "iu":
        raise ValueError(
            f"{where}.update_priorities: keys must be [B] ints and priorities [B]; got "
            f"{keys.dtype}{keys.shape} and {priorities.shape}."
        )
    if not (np.isfinite(priorities).all() and (priorities >= 0).all()):
        raise ValueError(
            f"{where}.update_priorities: priorities must be finite and at least 0; got "
            f"{priorities.min()} to {priorities.max()}. Has the learner diverged?"
        )
    return keys, priorities
