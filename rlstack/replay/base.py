"""What every replay buffer is: a table of items cut from streams of steps.

Writers add *steps*, one batch of environments at a time. Readers sample *items*: windows of
``unroll_length + 1`` consecutive steps of one environment. A step is stored once, however many
items it belongs to. The rules of a table (which item comes next, how often, how old) are Reverb's
(Cassirer et al. 2021, https://arxiv.org/abs/2102.04736) and mean the same in every backend.

Counting: sizes, inserts, samples and their ratio are in items, never in steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rlstack.checks import Checked
from rlstack.types import Batch, Logs, PyTree, Transition

LOOK_PERIOD = 0.2  # seconds that a dataset waits for a sample between two looks at its ``stop``


class Sample(NamedTuple):
    """One batch of items, and what to call them by."""

    batch: Batch  # trajectory [T+1, B, ...], weights [B] float32
    keys: np.ndarray  # [B] uint64, for update_priorities; never goes to a device


class ReplayClosedError(RuntimeError):
    """The buffer was closed; nothing can be added or sampled any more."""


class ReplayTimeoutError(TimeoutError):
    """What a call waited for did not come in time; nothing was added or sampled."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Checked):
    """The rules of one table."""

    sampler: Literal["fifo", "uniform", "prioritized"]
    """fifo: each item once, in order of completion (on-policy). uniform: with replacement.
    prioritized: with replacement, in proportion to priority ** priority_exponent."""
    batch_size: int
    """Items in one sample."""
    unroll_length: int
    """T: transitions in one item, which has T + 1 steps."""
    max_size: int
    """Items held at most. uniform and prioritized round it up to a multiple of the number of
    environments and then forget the oldest item; fifo counts it as dropped."""
    max_size_per_env: int | None = None
    """Items held of one environment at most. By default an even share of max_size; twice that for
    fifo, where environments of different speeds share the queue. Memory grows with it."""
    period: int | None = None
    """Steps between the starts of two items. Default: unroll_length for fifo (the last step of an
    item is the first of the next, so no transition is lost), 1 for the others."""
    starts: Literal["any", "not_last"] = "any"
    """not_last: no item begins at the end of an episode. For one-step and n-step methods, because
    LAST -> FIRST is no transition. Later boundaries in the item are the loss's to mask."""
    context: int = 0
    """Steps at the beginning of every item that only give it what came before: ``starts`` and the
    item's params version are judged at the step after them. They count in unroll_length."""
    frame_stack: int = 0
    """k, to store stacks of k frames one frame a step; see `rlstack.replay.frame_stack`. 0: as
    they come."""
    min_size: int = 1
    """Items that must have been inserted before the first sample."""
    samples_per_insert: float | None = None
    """Items sampled for each item inserted after min_size, at most. None: no limit."""
    samples_per_insert_tolerance: float | None = None
    """How many sampled items either side may be ahead of that ratio before it waits, where the
    backend waits at all. Default: batch_size."""
    max_times_sampled: int | None = None
    """Samples after which an item leaves; 0 for no limit. Default: 1 for fifo, 0 otherwise."""
    max_staleness: int | None = None
    """fifo only: params versions an item may lie behind the newest; older ones are dropped and
    counted. None: no limit."""
    min_actors: int = 0
    """fifo only: 0 for batches of batch_size; otherwise batches are *rounds*, made of whatever
    items wait once this many actors have one of the newest params version of all their
    environments, and grace_seconds have passed or all actors have."""
    grace_seconds: float = 1.0
    """How long a round waits for the other actors after min_actors have reported."""
    timeout_seconds: float = 300.0
    """The longest that a call waits, where the backend waits at all, unless the call says."""
    priority_exponent: float = 0.6
    """alpha of prioritized sampling (Schaul et al. 2016, table 3)."""
    importance_exponent: float = 0.4
    """beta of the importance weights, at the start (Schaul et al. 2016, table 3)."""
    importance_exponent_final: float = 1.0
    """beta once importance_anneal_samples items have been sampled."""
    importance_anneal_samples: int = 0
    """Items sampled until beta has moved linearly to its final value; 0: it does not move."""

    def __post_init__(self) -> None:
        """Checks every range.

        Raises:
          ValueError: a field is out of range, or two fields contradict each other.
        """
        require, fifo = self.require, self.sampler == "fifo"
        samplers = ("fifo", "uniform", "prioritized")
        require("sampler", self.sampler in samplers, "fifo, uniform or prioritized")
        require("starts", self.starts in ("any", "not_last"), "any or not_last")
        self.require_at_least(1, "batch_size", "unroll_length", "max_size", "min_size")
        fits = self.period is None or 1 <= self.period <= self.unroll_length
        require("period", fits, f"in 1..unroll_length ({self.unroll_length}), or None")
        if self.max_size_per_env is not None:
            require("max_size_per_env", self.max_size_per_env >= 1, "at least 1, or None")
        fits = 0 <= self.context < self.unroll_length
        require("context", fits, f"in 0..unroll_length - 1 ({self.unroll_length - 1})")
        require("frame_stack", self.frame_stack == 0 or self.frame_stack > 1, "0, or at least 2")
        fits = self.max_size >= self.batch_size
        require("max_size", fits, f"at least batch_size ({self.batch_size})")
        if self.samples_per_insert is not None:
            positive = self.samples_per_insert > 0
            require("samples_per_insert", positive, "positive, or None for no limit")
        require("samples_per_insert_tolerance", self.tolerance >= 0, "at least 0, or None")
        rule = "at least 0; at least 1 for fifo, or it would stand"
        require("max_times_sampled", self.times_limit >= fifo, rule)
        if self.max_staleness is not None:
            require("max_staleness", fifo, "None unless the sampler is fifo")
            require("max_staleness", self.max_staleness >= 0, "at least 0, or None")
        require("min_actors", fifo or not self.min_actors, "0 unless the sampler is fifo")
        for name in ("min_actors", "grace_seconds"):
            require(name, 0 <= getattr(self, name) < math.inf, "finite and at least 0")
        lasts = 0 < self.timeout_seconds < math.inf
        require("timeout_seconds", lasts, "positive and finite, or a run could hang for ever")
        for name in ("priority_exponent", "importance_exponent", "importance_exponent_final"):
            require(name, 0 <= getattr(self, name) <= 1, "in 0..1")
        self.require_at_least(0, "importance_anneal_samples")

    @property
    def step_period(self) -> int:
        """Steps between the starts of two items, with the default filled in."""
        if self.period is not None:
            return self.period
        return self.unroll_length if self.sampler == "fifo" else 1

    @property
    def times_limit(self) -> int:
        """Samples after which an item leaves, 0 for no limit, with the default filled in."""
        if self.max_times_sampled is not None:
            return self.max_times_sampled
        return 1 if self.sampler == "fifo" else 0

    @property
    def tolerance(self) -> float:
        """Items by which sampling may be ahead, with the default filled in."""
        if self.samples_per_insert_tolerance is not None:
            return self.samples_per_insert_tolerance
        return float(self.batch_size)

    def items_per_env(self, num_envs: int) -> int:
        """Items held of one environment at most, with the default filled in."""
        if self.max_size_per_env is not None:
            return min(self.max_size_per_env, self.max_size)
        share = -(-self.max_size // num_envs)
        return min(2 * share, self.max_size) if self.sampler == "fifo" else share


class ReplayBuffer(Protocol):
    """Steps in, items out.

    Which wait and which do not: a backend that shares one thread with its writers (in-process)
    never waits, since nobody else could end the wait; ``sample`` raises at once instead, and a
    full fifo drops its oldest items. Backends between processes wait on both sides: ``sample`` for
    items, ``add`` while a fifo is full or while writers are ahead of samples_per_insert by more
    than the tolerance. Every wait ends after its timeout, or at once when the buffer is closed,
    and is added up in ``stats``.
    """

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Appends one step of each of some environments.

        Args:
          env_ids: [n] ints, distinct, in ``[0, num_envs)``; None for all environments in order.
          transition: leaves ``[n, ...]``; structure, shapes and dtypes as at the first call.
          timeout: seconds to wait for room at most; None for the config's.

        Raises:
          ValueError: ids or leaves are not as above.
          ReplayTimeoutError: there was no room in time.
          ReplayClosedError: after ``close``.
        """

    def gap(self, env_ids: np.ndarray | None) -> None:
        """Says that the next steps of these environments do not follow on those added before.

        For an environment that was restarted, or a writer that lost steps. Unfinished items are
        dropped; no item spans the gap, and those that would have count towards max_size_per_env
        when their turn comes. An ordinary end of an episode is no gap.
        """

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every item that was completed can be sampled; at once where it is memory.

        Raises:
          ReplayTimeoutError: they were not in time.
        """

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether ``sample`` would succeed now. Cheap enough to ask after every step."""

    def sample(self, batch_size: int | None = None, timeout: float | None = None) -> Sample:
        """Draws ``batch_size`` (by default the config's) items, or a round of them.

        The arrays belong to the buffer and must not be written to. They keep their values until
        the next call but one to ``sample``, and while they are referred to by a few threads that
        each hold one, except that a fifo batch may be a view of the storage:
        such a batch also ends when ``items_per_env * period`` further steps of an environment have
        been added since its items were completed. Copy what must live longer, and let work on a
        batch that was handed to a device asynchronously finish before then.

        Args:
          batch_size: items; rounds are as large as they are.
          timeout: seconds to wait for them at most; None for the config's.

        Raises:
          ReplayTimeoutError: ``can_sample`` was false all the time; the message says why and what
            to do.
          ReplayClosedError: after ``close``.
        """

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets priorities ``[B]`` of items by their keys ``[B]``; items that left are ignored.

        Other samplers than prioritized ignore the call, so that one learner serves all.
        """

    def set_params_version(self, version: int) -> None:
        """Tells the version of the learner's params, against which lag and staleness count.

        Without it the newest version seen in added steps is taken.
        """

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sample]:
        """Yields samples until ``close``; in-process, only while ``can_sample``.

        Args:
          stop: ends the iteration once it returns True. It is asked before each sample and every
            fraction of a second while one is awaited, for which there is no timeout then.
        """

    def stats(self) -> Logs:
        """Returns sizes, counters, seconds waited, and the last batch's lag in params versions."""

    def save(self) -> PyTree:
        """Returns the whole state, contents and random generator included, as numpy arrays."""

    def load(self, tree: PyTree) -> None:
        """Puts back what ``save`` returned; sampling then goes on as if never interrupted."""

    def close(self) -> None:
        """Frees the storage and ends every iterator; a second call does nothing."""


def as_logs(**values: Any) -> Logs:
    """Returns scalars by name, as numpy arrays."""
    return {name: np.asarray(value) for name, value in values.items()}
