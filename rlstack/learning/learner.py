"""The Learner: owns params and learner state, and updates them with samples.

It jits the agent's ``learner_step`` once. With an accelerator it draws the next batch, and moves it
to the device, while an update runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent, EpochAgent
from rlstack.configs.learner import LearnerConfig
from rlstack.devices.placement import Placement
from rlstack.learning.update import OneCall, Update, Updated, in_thread
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.replay import ReplayClosedError
from rlstack.rpc import Node, Stop, remote
from rlstack.types import Batch, LearnerState, Logs, LogWriter, Params, PRNGKey, PyTree


class SampleLike(Protocol):
    """A replay buffer's sample: a batch and the keys of its items."""

    @property
    def batch(self) -> Batch:
        """Trajectory ``[T+1, B, ...]`` and weights ``[B]``."""

    @property
    def keys(self) -> np.ndarray:
        """The keys of the items in replay, ``[B]`` uint64."""


class ReplayReader(Protocol):
    """The reader's side of a ReplayBuffer."""

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Sets new priorities of items."""

    def write_back(self, keys: np.ndarray, updates: PyTree) -> None:
        """Writes `LearnerOutput.updates` into the steps of items."""

    def set_params_version(self, version: int) -> None:
        """Sets the version of the newest params; staleness is measured against this version."""

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[SampleLike]:
        """Yields samples until `stop` returns True or the buffer is closed."""


class SampleReader(Protocol):
    """What gives samples when it is asked, such as a ReplayBuffer."""

    def sample(self) -> SampleLike:
        """Draws a batch of items."""


_NO_KEYS = np.zeros(0, np.uint64)


def in_micro_batches(agent: Agent, cfg: LearnerConfig) -> Agent:
    """Returns the agent as it learns; raises what `rlstack.networks.in_parts` raises."""
    if cfg.micro_batches == 1:
        return agent
    from rlstack.networks import in_parts

    return agent.with_network(lambda network: in_parts(network, cfg.micro_batches))


class NonFiniteError(ArithmeticError):
    """The loss or gradient of an update is NaN or infinite; the attributes allow running it again.

    Attributes:
      before: a dict of "params" and "learner_state", as before the update.
      batch: the batch of the update.
    """

    def __init__(self, message: str, before: PyTree, batch: Batch) -> None:
        super().__init__(message)
        self.before = before
        self.batch = batch


class Learner(Node):
    """Learns from samples and publishes params by version.

    Attributes:
      params: the newest params.
      learner_state: the newest learner state. The next update reuses its memory, so copy what
          must outlive it.
      version: number of updates, including those before a `load`.
    """

    def __init__(
        self,
        cfg: LearnerConfig,
        agent: Agent,
        replay_buffer: ReplayReader | None,
        rng_key: PRNGKey,
        batch: Batch | None = None,
    ) -> None:
        """Initialises params and learner state.

        Args:
          cfg: options for running the updates.
          agent: the agent that learns, by its ``learner_step``.
          replay_buffer: `run` samples from it, and it receives new priorities. None if only `step`
              is called and the agent returns no priorities.
          rng_key: the key for the initial params and the learner's own key; it is consumed.
          batch: shapes and dtypes of a batch, as for `compile`. With it, compilation begins here,
            in a thread.
        """
        self._cfg = cfg
        self._replay_buffer = replay_buffer
        agent = in_micro_batches(agent, cfg)
        self._placement = Placement(cfg.devices, cfg.processes)
        # One function, because the start of a node waits for each compilation.
        begin = CompiledQuickly(functools.partial(_begin, agent))
        params, learner_state = begin.eval_shape(rng_key)
        self._update = _compiled(cfg, agent, params, self._placement)
        self._compiling: Future[None] | None = None
        on_default = not (cfg.devices or self._placement.several)
        if batch is not None and isinstance(self._update, OneCall) and on_default:
            self._compiling = in_thread(self._update.compile, params, learner_state, batch)
        self.params, self.learner_state = self._placement.all_of(begin(rng_key))
        self.version = 0
        self._idle: Batch | None = None  # zeros, for an update in which this process has no batch
        self._draw_seconds = self._device_seconds = 0.0

    @remote(idempotent=True)
    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        """Returns (version, params), or None when there is nothing newer.

        If params are on several devices, the copy on the first device is returned. Safe to call
        from other threads.
        """
        if self.version <= newer_than:
            return None
        version = self.version  # read first, so that params are at least as new as the version
        return version, self._placement.one_of(self.params)

    def compile(self, batch: Batch) -> None:
        """Compiles the update before the first batch, if it is one jitted function.

        Args:
          batch: shapes and dtypes of later batches (``jax.ShapeDtypeStruct``). For batches of other
              shapes the update is compiled at its first call.
        """
        if self._compiling is not None:
            self._compiling.result()
        elif isinstance(self._update, OneCall) and not self._placement.several:
            self._update.compile(self.params, self.learner_state, batch)

    def compiled_update(self, sample: SampleLike) -> dict[str, int]:
        """Returns how often an update calls each compiled function, by XLA's HLO of it."""
        placed = self._update.place(sample.batch)
        return self._update.compiled(self.params, self.learner_state, placed)

    def step(self, sample: SampleLike) -> Logs:
        """Makes one update; returns its logs as numpy scalars.

        After it returns, the sample's arrays are not read any more and may be overwritten.

        Raises:
          NonFiniteError: the loss, the gradient or the new params are NaN or infinite; params and
              learner state are as before. Other logs may be.
        """
        placed = self._update.place(sample.batch)
        started = self._start(placed, sample.batch, sample.keys)
        self.version = started.version
        return self._finish(started)

    def update_from(self, replay_buffer: SampleReader, most: float = math.inf) -> Logs:
        """Makes the next updates: one here, with a sample of the replay.

        Args:
          replay_buffer: the replay, which has a sample now.
          most: the number of updates, ever, after which none is made, above the number so far.

        Returns:
          The logs of updates, a scalar or a vector of each, of which each entry is of one update.

        Raises:
          NonFiniteError: see `step`.
        """
        del most
        return self.step(replay_buffer.sample())

    def last_logs(self) -> Logs:
        """Returns the logs of updates that `update_from` has not returned; none here."""
        return {}

    @property
    def carries_votes(self) -> bool:
        """Whether `step_if_all` can be called: in most groups of processes, after a `step`."""
        return self._idle is not None

    def step_if_all(
        self, sample: SampleLike | None, votes: Sequence[int]
    ) -> tuple[np.ndarray, Logs | None]:
        """Makes one update if all processes of the group want it; all must call it together.

        Args:
          sample: the sample to learn from, as in `step`. None if this process has no sample; it
            then votes against the update.
          votes: integers from 0 to 2^24 for all processes. The first says whether this process is
              for the update.

        Returns:
          The votes of each process ``[processes, len(votes)]``; the logs of the update, or None if
          a process voted against it.

        Raises:
          NonFiniteError: see `step`.
        """
        assert self._idle is not None
        batch, keys = (self._idle, _NO_KEYS) if sample is None else (sample.batch, sample.keys)
        started = self._start(self._update.place(batch, votes), batch, keys)
        assert started.updated.votes is not None
        cast = self._placement.by_process(started.updated.votes)[:, : len(votes)]
        if not cast[:, 0].all():
            return cast, None
        self.version = started.version  # only now: other threads read it
        return cast, self._finish(started)

    def _start(
        self, placed: Any, batch: Batch, keys: np.ndarray, last: _Started | None = None
    ) -> _Started:
        """Starts an update; with an accelerator, it returns before the update has ended.

        The caller sets `version` once it knows that the update counts.

        Args:
          placed: the batch on the devices.
          batch: the batch.
          keys: the keys of its items.
          last: the update before it, if that may still run; only if `_overlaps`.
        """
        if last is None:
            updated = self._update(self.params, self.learner_state, placed)
        else:
            update = cast("OneCall", self._update)
            updated = update(self.params, self.learner_state, placed, last.updated.failed)
        after, placement = (updated.params, updated.learner_state), self._placement
        by_xla, one_process = updated.votes is None, placement.processes == 1
        if by_xla and one_process and placement.several and self._cfg.micro_batches > 1:
            after = placement.all_of(after)  # XLA may divide the results of the parts
        elif not (by_xla or one_process or self._idle):
            self._idle = jax.tree.map(np.zeros_like, batch)
        self.params, self.learner_state = after
        return _Started(updated, batch, keys, self.version + 1)

    def _finish(self, started: _Started) -> Logs:
        """Waits for an update; returns its logs and sends its priorities."""
        updated = started.updated
        begun = time.perf_counter()
        logs, finite = updated.fetch()  # on the host, so that a single device has finished
        if self._placement.several:
            jax.block_until_ready(self.params)
        self._device_seconds += time.perf_counter() - begun
        if self._cfg.check_finite and not finite:
            if self.version == started.version:
                self.params, self.learner_state = updated.before
            self.version = started.version - 1  # a later update has changed nothing either
            before = self.params, self.learner_state
            raise non_finite(logs, before, started.batch, self.version)
        if updated.priorities is not None and self._replay_buffer is not None:
            priorities = self._placement.own_rows(updated.priorities)
            self._replay_buffer.update_priorities(started.keys, priorities)
        if updated.updates is not None and self._replay_buffer is not None:
            self._replay_buffer.write_back(started.keys, jax.device_get(updated.updates))
        return logs

    def run(self, stop: Stop = None, logger: LogWriter | None = None) -> None:
        """Learns from the replay buffer's dataset until told to stop or the dataset ends.

        Args:
          stop: a function or a ``threading.Event`` that says when to stop. It is also checked
              during a wait for a sample. None: stops when the Launchpad program of this node stops;
              without such a program, never.
          logger: receives the logs of each update, as ``learner/...``, at the update's version.

        Raises:
          NonFiniteError: see `step`.
          ValueError: the learner has no replay buffer.
        """
        replay_buffer = self._replay_buffer
        if replay_buffer is None:
            raise ValueError("Learner.run: replay_buffer must be given; got replay_buffer=None.")
        with self._running(stop) as should_stop, contextlib.suppress(ReplayClosedError):
            samples = iter(replay_buffer.make_dataset(should_stop))
            run = self._run_ahead if self._prefetches else self._run_in_turn
            for version, logs in run(samples, replay_buffer):
                if logger is not None:
                    logger.write(version, {f"learner/{k}": v for k, v in logs.items()})

    @property
    def _prefetches(self) -> bool:
        wished = self._cfg.prefetch
        return wished == "on" or (wished == "auto" and not self._placement.on_cpu)

    @property
    def _overlaps(self) -> bool:
        """Whether an update can start before the last one has ended."""
        return isinstance(self._update, OneCall) and not self._placement.several

    def _run_in_turn(
        self, samples: Iterator[SampleLike], replay_buffer: ReplayReader
    ) -> Iterator[tuple[int, Logs]]:
        """Draws each batch after the previous update; yields version and logs of each update."""
        while (sample := self._draw(samples)) is not None:
            logs = self.step(sample)
            replay_buffer.set_params_version(self.version)
            yield self.version, logs

    def _run_ahead(
        self, samples: Iterator[SampleLike], replay_buffer: ReplayReader
    ) -> Iterator[tuple[int, Logs]]:
        """Draws and moves each batch during the previous update; yields as `_run_in_turn` does.

        The device has the next update before the host reads the logs of the last one, so it does
        not wait for the host.
        """
        started: _Started | None = None
        with contextlib.suppress(ReplayClosedError):  # then the last update is still finished
            while (sample := self._draw(samples)) is not None:
                begun = time.perf_counter()
                batch, placed = self._staged(sample.batch)
                keys = np.array(sample.keys)
                self._draw_seconds += time.perf_counter() - begun
                last = started
                if last is not None and not self._overlaps:
                    yield last.version, self._finish(last)
                    last = None
                started = self._start(placed, batch, keys, last)
                self.version = started.version
                replay_buffer.set_params_version(self.version)
                if last is not None:
                    yield last.version, self._finish(last)
        if started is not None:
            yield started.version, self._finish(started)

    def _staged(self, batch: Batch) -> tuple[Batch, Any]:
        """Copies a batch, which may then be overwritten; returns it on the host and on the devices.

        It waits for the transfer, and not for computations that run on the devices.
        """
        if self._placement.several:
            batch = jax.tree.map(np.array, batch)
            return batch, jax.block_until_ready(self._update.place(batch))
        moved = self._placement.staged(batch)
        return moved, moved

    def _draw(self, samples: Iterator[SampleLike]) -> SampleLike | None:
        begun = time.perf_counter()
        try:
            return next(samples, None)
        finally:
            self._draw_seconds += time.perf_counter() - begun

    def stats(self) -> dict[str, float]:
        """Returns for how long the learner has waited.

        ``draw_seconds`` is the time for drawing batches and, if they are prefetched, for moving
        them. ``device_seconds`` is the time in which it only waited for an update to end.
        """
        return {"draw_seconds": self._draw_seconds, "device_seconds": self._device_seconds}

    def save(self) -> PyTree:
        """Returns params, a copy of the learner state, and the version."""
        return {
            "params": self._placement.one_of(self.params),
            "learner_state": jax.tree.map(jnp.copy, self._placement.one_of(self.learner_state)),
            "version": np.int64(self.version),
        }

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
        self.params, self.learner_state = self._placed(saved["params"], saved["learner_state"])
        self.version = int(saved["version"])

    def _placed(self, params: Params, learner_state: LearnerState) -> tuple[Params, LearnerState]:
        return self._placement.all_of(params), self._placement.owned(learner_state)


class _Started(NamedTuple):
    """An update that may still run."""

    updated: Updated
    batch: Batch
    keys: np.ndarray
    version: int  # of its params


def _begin(agent: Agent, rng_key: PRNGKey) -> tuple[Params, LearnerState]:
    """Returns initial params and learner state; pure."""
    params_key, learner_key = jax.random.split(rng_key)
    params = agent.initial_params(params_key)
    return params, agent.initial_learner_state(learner_key, params)


def _compiled(cfg: LearnerConfig, agent: Agent, params: Params, placement: Placement) -> Update:
    calls, divides = isinstance(agent, EpochAgent) and _takes_calls(cfg, params), False
    if placement.several:
        from rlstack.learning.by_shard import can_be_sharded

        divides = can_be_sharded(agent.network)
    if calls:
        from rlstack.learning.by_minibatch import CallByMinibatch, ShardedCalls

        return (ShardedCalls if divides else CallByMinibatch)(cast("EpochAgent", agent), placement)
    if divides:
        from rlstack.learning.sharded import ShardedUpdate

        return ShardedUpdate(agent, params, placement, check_finite=cfg.check_finite)
    return OneCall(agent, placement, check_finite=cfg.check_finite)


def _takes_calls(cfg: LearnerConfig, params: Params) -> bool:
    if cfg.minibatches != "auto":
        return cfg.minibatches == "calls"
    # Only convolution kernels have four axes.
    has_convolutions = any(leaf.ndim >= 4 for leaf in jax.tree.leaves(params))
    return has_convolutions and jax.default_backend() == "cpu"


def non_finite(logs: Logs, before: tuple, batch: Batch, version: int) -> NonFiniteError:
    """Returns the error of an update that gave NaN or infinity.

    Args:
      logs: the logs of the update.
      before: params and learner state before the update.
      batch: the batch of the update.
      version: number of earlier updates.
    """
    bad = [name for name, value in logs.items() if not math.isfinite(value)] or ["params"]
    params, learner_state = before
    return NonFiniteError(
        f"Learner: update {version + 1} gave non-finite {', '.join(sorted(bad))}. The params "
        "are unchanged. Lower the learning rate, or check the rewards and observations.",
        before={"params": params, "learner_state": learner_state},
        batch=jax.tree.map(np.array, batch),
    )
