"""The Learner: owns params and learner state, and updates them with samples.

It jits the agent's ``learner_step`` once. No buffers are donated: params are small in reinforcement
learning, the Inferencer continues to read the published params, and an update that gives NaN must
keep the params and state from before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstack.agent import Agent, EpochAgent
from rlstack.checks import Checked
from rlstack.networks import convolution, in_parts
from rlstack.replay import ReplayClosedError
from rlstack.rpc import Node, Stop, remote
from rlstack.types import (
    Batch,
    LearnerOutput,
    LearnerState,
    Logs,
    LogWriter,
    Params,
    PRNGKey,
    PyTree,
)

# Initial params are computed only once, and optimizing their random draws takes XLA a second.
_QUICKLY = {"xla_backend_optimization_level": 1}

_Step = Callable[[Params, LearnerState, Batch], tuple[Params, LearnerState, LearnerOutput]]


@dataclasses.dataclass(frozen=True)
class LearnerConfig(Checked):
    """How the learner runs its agent's updates."""

    num_devices: int = 1
    """Number of local devices that share each batch. It must divide the batch size."""
    minibatches: Literal["auto", "scan", "calls"] = "auto"
    """How an agent with epochs runs its minibatches: in one compiled loop (scan), or in one call
    per minibatch (calls). auto chooses calls for convolutions on the CPU, because XLA's loops are
    many times slower there."""
    micro_batches: int = 1
    """Number of parts of a batch (with epochs: of a minibatch) that the network learns from one
    after another. The update stays the same, except for the order of sums. Raise it if a batch does
    not fit into the device's memory; each update then runs the network forward twice."""
    check_finite: bool = True
    """Whether a NaN or infinite loss stops the run. Its inputs are saved for `rlstack rerun`."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "num_devices", "micro_batches")
        known = self.minibatches in ("auto", "scan", "calls")
        self.require("minibatches", known, "auto, scan or calls")


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

    def set_params_version(self, version: int) -> None:
        """Sets the version of the newest params, which staleness is measured against."""

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[SampleLike]:
        """Yields samples until `stop` returns True or the buffer is closed."""


class NonFiniteError(ArithmeticError):
    """An update gave NaN or infinite logs; the attributes allow running it again.

    Attributes:
      before: {"params", "learner_state"} from before the update.
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
      learner_state: the newest learner state.
      version: number of updates, including those before a `load`.
    """

    def __init__(
        self,
        cfg: LearnerConfig,
        agent: Agent,
        replay_buffer: ReplayReader | None,
        rng_key: PRNGKey,
    ) -> None:
        """Initialises params and learner state.

        Args:
          cfg: how to run the updates.
          agent: the agent that learns, by its ``learner_step``.
          replay_buffer: `run` samples from it, and it receives new priorities. None if only `step`
              is called and the agent returns no priorities.
          rng_key: the key for the initial params and the learner's own key; it is consumed.
        """
        self._cfg = cfg
        self._replay_buffer = replay_buffer
        if cfg.micro_batches > 1:
            agent = agent.with_network(lambda network: in_parts(network, cfg.micro_batches))
        params_key, learner_key = jax.random.split(rng_key)
        self.params = jax.jit(agent.initial_params, compiler_options=_QUICKLY)(params_key)
        self.learner_state = jax.jit(agent.initial_learner_state)(learner_key, self.params)
        self.version = 0
        self._shard, self._everywhere = _sharding(cfg.num_devices)
        self.params, self.learner_state = self._placed(self.params, self.learner_state)
        self._step = _jitted_step(cfg, agent, self.params)

    @remote(idempotent=True)
    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        """Returns (version, params), or None when there is nothing newer.

        If params are on several devices, the copy on the first device is returned. Safe to call
        from other threads.
        """
        if self.version <= newer_than:
            return None
        if self._everywhere is None:
            return self.version, self.params
        version = self.version  # read first, so that params are at least as new as the version
        return version, jax.tree.map(lambda x: x.addressable_data(0), self.params)

    def compile(self, batch: Batch) -> None:
        """Compiles the update before the first batch, if it is one jitted function.

        Args:
          batch: shapes and dtypes of later batches (``jax.ShapeDtypeStruct``). For batches of other
              shapes the update is compiled at its first call.
        """
        lower = getattr(self._step, "lower", None)
        if lower is not None and self._everywhere is None:
            lower(self.params, self.learner_state, batch).compile()

    def step(self, sample: SampleLike) -> Logs:
        """Makes one update; returns its logs as numpy scalars.

        After it returns, the sample's arrays are not read any more and may be overwritten.

        Raises:
          NonFiniteError: a log is NaN or infinite; params and learner state are as before.
        """
        before = self.params, self.learner_state
        batch = self._shard(sample.batch)
        params, learner_state, output = self._step(*before, batch)
        logs = output.logs  # on the host, so that a single device has finished
        if self._everywhere is not None:
            if self._cfg.micro_batches > 1:  # XLA may divide the results of the parts
                params, learner_state = self._placed(params, learner_state)
            jax.block_until_ready(params)
        if self._cfg.check_finite and not all(map(math.isfinite, logs.values())):
            raise non_finite(logs, before, sample.batch, self.version)
        self.params, self.learner_state = params, learner_state
        self.version += 1
        if output.priorities is not None and self._replay_buffer is not None:
            self._replay_buffer.update_priorities(sample.keys, np.asarray(output.priorities))
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
            for sample in replay_buffer.make_dataset(should_stop):
                logs = self.step(sample)
                replay_buffer.set_params_version(self.version)
                if logger is not None:
                    logger.write(self.version, {f"learner/{k}": v for k, v in logs.items()})

    def save(self) -> PyTree:
        """Returns params, learner state and version."""
        return {
            "params": self.params,
            "learner_state": self.learner_state,
            "version": np.int64(self.version),
        }

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
        self.params, self.learner_state = self._placed(saved["params"], saved["learner_state"])
        self.version = int(saved["version"])

    def _placed(self, params: Params, learner_state: LearnerState) -> tuple[Params, LearnerState]:
        if self._everywhere is None:
            return params, learner_state
        return jax.device_put((params, learner_state), self._everywhere)


def _jitted_step(cfg: LearnerConfig, agent: Agent, params: Params) -> _Step:
    if isinstance(agent, EpochAgent) and _takes_calls(cfg, params):
        return _call_by_minibatch(agent)
    return _one_call(agent)


def _one_call(agent: Agent) -> _Step:
    """Returns the jitted ``learner_step``, with its logs as one vector until they are on the host.

    An update of a small network takes a few hundred microseconds, so each transferred array and
    each Python loop over the logs takes a noticeable fraction of it.
    """
    names: list[str] = []

    def packed(params: Params, learner_state: LearnerState, batch: Batch) -> Any:
        # An agent with epochs scans over its minibatches.
        in_loop = convolution.in_loop if isinstance(agent, EpochAgent) else contextlib.nullcontext
        with in_loop():
            params, learner_state, output = agent.learner_step(params, learner_state, batch)
        names[:] = output.logs  # runs during tracing: the names of the compiled function
        logs = jnp.array([jnp.mean(jnp.asarray(x, jnp.float32)) for x in output.logs.values()])
        return params, learner_state, logs, output.priorities

    jitted = jax.jit(packed)

    def step(
        params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        params, learner_state, logs, priorities = jitted(params, learner_state, batch)
        fetched = dict(zip(names, np.asarray(logs), strict=True))
        return params, learner_state, LearnerOutput(fetched, priorities)

    step.lower = jitted.lower  # type: ignore[attr-defined]
    return step


def _takes_calls(cfg: LearnerConfig, params: Params) -> bool:
    if cfg.minibatches != "auto":
        return cfg.minibatches == "calls"
    # Only convolution kernels have four axes.
    has_convolutions = any(leaf.ndim >= 4 for leaf in jax.tree.leaves(params))
    return has_convolutions and jax.default_backend() == "cpu" and cfg.num_devices == 1


def _call_by_minibatch(agent: EpochAgent) -> _Step:
    """Returns ``learner_step`` with one jitted call per minibatch, gathered on the host."""
    prepare, update = jax.jit(agent.prepare), jax.jit(agent.update)
    finish = jax.jit(agent.finish)

    def step(
        params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        learner_state, rows, schedule = prepare(params, learner_state, batch)
        rows = jax.tree.map(np.asarray, rows)
        all_logs = []
        for indices in np.asarray(schedule):
            minibatch = jax.tree.map(lambda x, i=indices: np.take(x, i, axis=0), rows)
            minibatch = agent.lay_out_rows(minibatch)
            *after, output = update(params, learner_state, minibatch)
            all_logs.append(output.logs)
            if agent.may_stop and agent.stops_at(output.logs):
                break
            params, learner_state = after
        params, learner_state = finish(params, learner_state)
        logs = jax.tree.map(_mean, *all_logs)
        if agent.may_stop:
            logs["minibatches"] = np.float32(len(all_logs))
        return params, learner_state, LearnerOutput(logs)

    return step


def _mean(*values: Any) -> np.floating:
    return np.mean([np.asarray(value) for value in values])


def _sharding(num_devices: int) -> tuple[Callable[[Batch], Batch], NamedSharding | None]:
    """Returns a function that splits a batch over devices, and the sharding of params."""
    if num_devices == 1:
        return lambda batch: batch, None
    if num_devices > len(jax.local_devices()):
        raise ValueError(
            f"LearnerConfig: num_devices must be at most the {len(jax.local_devices())} local "
            f"devices; got {num_devices}. On a CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N gives N of them."
        )
    mesh = Mesh(np.array(jax.local_devices()[:num_devices]), ("batch",))
    by_column = NamedSharding(mesh, PartitionSpec(None, "batch"))
    by_row = NamedSharding(mesh, PartitionSpec("batch"))

    def shard(batch: Batch) -> Batch:
        batch_size = batch.weights.shape[0]
        if batch_size % num_devices:
            raise ValueError(
                f"Learner: the batch of {batch_size} items must split evenly over {num_devices} "
                "devices. Change --replay.batch-size or --learner.num-devices."
            )
        return Batch(
            jax.device_put(batch.trajectory, by_column), jax.device_put(batch.weights, by_row)
        )

    return shard, NamedSharding(mesh, PartitionSpec())


def non_finite(logs: Logs, before: tuple, batch: Batch, version: int) -> NonFiniteError:
    """Returns the error of an update that gave NaN or infinity.

    Args:
      logs: of the update.
      before: params and learner state before it.
      batch: it learned from.
      version: number of updates before it.
    """
    bad = [name for name, value in logs.items() if not math.isfinite(value)]
    params, learner_state = before
    return NonFiniteError(
        f"Learner: update {version + 1} gave non-finite {', '.join(sorted(bad))}. The params "
        "are unchanged. Lower the learning rate, or check the rewards and observations.",
        before={"params": params, "learner_state": learner_state},
        batch=jax.tree.map(np.array, batch),
    )
