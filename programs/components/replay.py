"""Makes the replay of an experiment: in one process, in shared memory, or on a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TextIO, TypeVar

import jax
import numpy as np

from rlstack.programs.components.saved_replays import SavedReplays, Server
from rlstack.programs.components.seeds import role_seed
from rlstack.programs.experiment import Experiment
from rlstack.replay import (
    InProcessReplay,
    ReplayBuffer,
    ReplayConfig,
    SharedMemHandle,
    SharedMemReplayBuffer,
    bytes_needed,
)
from rlstack.replay.frame_stack import FrameStacks, StackedReplay
from rlstack.replay.memory import check_memory
from rlstack.replay.served import ServedReplayBuffer
from rlstack.replay.served.calls import Caller
from rlstack.replay.shared_memory.block import FOLDER
from rlstack.replay.shared_memory.steps import total_bytes
from rlstack.storage import checkpoint
from rlstack.types import Batch, PyTree, Transition

if TYPE_CHECKING:
    from rlstack.replay.reverb import ReverbReplayBuffer

Access = TypeVar("Access")  # to a server: its address, or a client of it


def make_replay(experiment: Experiment, spec: Transition) -> ReplayBuffer:
    """Makes the replay of a single process, for steps of this `transition_spec`."""
    stored = _Stored.of(experiment, spec)
    num_envs, seed = experiment.env.num_envs, role_seed(experiment.seed, "replay")
    return stored.stacked(InProcessReplay(stored.cfg, num_envs, seed=seed, spec=stored.spec))


def announce_replay(
    experiment: Experiment, spec: Transition, stream: TextIO, runs: int = 1
) -> None:
    """Prints how much memory the replay takes, before it is allocated.

    Args:
      experiment: the experiment, with its replay.
      spec: of one environment's step, as `rlstack.acting.actor.transition_spec` returns it.
      stream: where to print.
      runs: number of runs in this process, each with such a replay.

    Raises:
      ValueError: the machine has less memory than that.
    """
    size = replay_bytes(experiment, spec, runs)
    print(f"replay: {size:,} bytes at most", file=stream, flush=True)


def replay_bytes(experiment: Experiment, spec: Transition, runs: int = 1) -> int:
    """Returns the bytes that the replay takes at most; arguments as in `announce_replay`.

    Raises:
      ValueError: the machine has less memory than that.
    """
    stored, num_envs = _Stored.of(experiment, spec), experiment.total_envs
    in_shared_memory = experiment.topology in ("heavy_env", "light_env")
    is_served = experiment.topology == "distributed" and experiment.replay.chosen_service == "table"
    if in_shared_memory or is_served:
        steps, others = total_bytes(stored.cfg, num_envs, stored.spec)
        if in_shared_memory:
            check_memory(steps, "replay", FOLDER)
        size = steps + others
    else:
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), stored.spec)
        size = bytes_needed(stored.cfg, example, num_envs)
    size *= runs
    check_memory(size, "replay")
    return size


class ReplayWriter(Protocol):
    """An actor's side of a program's replay."""

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Stores one step of some environments."""

    def flush(self) -> None:
        """Waits until everything added can be sampled."""

    def close(self) -> None:
        """Disconnects."""


class SavedReplay(NamedTuple):
    """The replay's part of a checkpoint."""

    tree: PyTree = ()
    metadata: Mapping[str, Any] = MappingProxyType({})


class LearnerReplay(NamedTuple):
    """The learner's side of a program's replay."""

    buffer: ReplayBuffer
    save: Callable[[], SavedReplay]
    template: Callable[[], PyTree]  # returns the structure of `SavedReplay.tree`; saves nothing
    load: Callable[[PyTree], None]  # restores the replay from `SavedReplay.tree`
    clean: Callable[[], None]  # removes saved contents to which no checkpoint refers any more
    name: str = ""  # of its shared memory; actors open it by this name


class ProgramReplay(Protocol):
    """The replay of a program of several nodes; every node opens its own side."""

    def reader(self) -> LearnerReplay:
        """Opens the learner's side."""

    def writer(self, rank: int, find_memory: Callable[[], str]) -> ReplayWriter:
        """Opens the side of the actor of this rank.

        Args:
          rank: of the actor.
          find_memory: asks the learner for `LearnerReplay.name`; called only if the replay has one.
        """


class SharedMemory:
    """Replay in memory that the learner owns and actors of the same machine write to."""

    def __init__(self, experiment: Experiment, spec: Transition) -> None:
        """Opens nothing yet; `spec` describes one environment's step."""
        self._experiment, self._spec = experiment, spec

    def reader(self) -> LearnerReplay:
        """Allocates the memory."""
        experiment = self._experiment
        stored = _Stored.of(experiment, self._spec)
        buffer = SharedMemReplayBuffer(
            stored.cfg,
            experiment.total_envs,
            seed=role_seed(experiment.seed, "replay"),
            spec=stored.spec,
            num_actors=experiment.num_actors,
        )
        stacked = stored.stacked(buffer)
        return LearnerReplay(
            stacked,
            save=lambda: SavedReplay(stacked.save()),
            template=lambda: jax.tree.map(lambda _: checkpoint.ANY_ARRAY, stacked.save()),
            load=stacked.load,
            clean=lambda: None,
            name=buffer.handle().name,
        )

    def writer(self, rank: int, find_memory: Callable[[], str]) -> ReplayWriter:
        """Opens the learner's memory for an actor."""
        experiment = self._experiment
        stored = _Stored.of(experiment, self._spec)
        handle = SharedMemHandle(find_memory(), stored.cfg, experiment.total_envs, stored.spec)
        return stored.stacked(handle.writer(rank, experiment.num_actors))


class _OnServer(Generic[Access]):
    """Replay on a server, which writes its own checkpoints and starts from one."""

    def __init__(
        self, experiment: Experiment, spec: Transition, saved: SavedReplays, server: Access
    ) -> None:
        """Does not connect yet.

        Args:
          experiment: the experiment, with its replay.
          spec: of one environment's step.
          saved: the checkpoints of the server.
          server: its address, or a client of it that serves this replay only.
        """
        self._experiment, self._spec = experiment, spec
        self._saved, self._server = saved, server

    def reader(self) -> LearnerReplay:
        """Connects the learner."""
        stored = _Stored.of(self._experiment, self._spec)
        buffer, saved = self._connect(stored), self._saved
        return LearnerReplay(
            stored.stacked(buffer),
            save=lambda: SavedReplay(metadata=saved.save(buffer)),
            template=lambda: (),
            load=lambda tree: None,
            clean=saved.clean,
        )

    def writer(self, rank: int, find_memory: Callable[[], str]) -> ReplayWriter:
        """Connects an actor."""
        del find_memory
        stored = _Stored.of(self._experiment, self._spec)
        return stored.stacked(self._connect(stored, self._experiment.env_ids(rank)))

    def _connect(self, stored: _Stored, env_ids: range | None = None) -> Server:
        """Connects a learner, or an actor with these environments."""
        raise NotImplementedError


class ReverbReplay(_OnServer[str]):
    """Replay on a Reverb server, found by its address."""

    def _connect(self, stored: _Stored, env_ids: range | None = None) -> ReverbReplayBuffer:
        from rlstack.replay.reverb import ReverbReplayBuffer

        experiment = self._experiment
        prefetch, max_pending = None, 64
        if experiment.program.pacing == "lock_step":
            # A round must sample every step added in it, and no step of a later round.
            prefetch = max_pending = 0
        elif experiment.replay.sampler == "fifo":
            # Prefetched and pending items become stale, like those in the queue.
            prefetch, max_pending = experiment.replay.batch_size, experiment.env.num_envs
        return ReverbReplayBuffer(
            stored.cfg,
            experiment.total_envs,
            self._server,
            stored.spec,
            env_ids=env_ids,
            num_actors=experiment.num_actors,
            prefetch=prefetch,
            max_pending=max_pending,
        )


class TableReplay(_OnServer[Caller]):
    """Replay in the table of another node, found by a client of its `ReplayService`."""

    def _connect(self, stored: _Stored, env_ids: range | None = None) -> ServedReplayBuffer:
        # In lock-step, a round must sample every step added in it, and no step of a later round.
        on_request = 0 if self._experiment.program.pacing == "lock_step" else None
        return ServedReplayBuffer(
            stored.cfg,
            self._experiment.total_envs,
            self._server,
            stored.spec,
            env_ids=env_ids,
            prefetch=on_request,
            max_pending=on_request,
        )


def batch_spec(cfg: ReplayConfig, spec: Transition) -> Batch:
    """Returns the shapes of a batch of ``batch_size`` items; ``spec`` is the `transition_spec`."""
    shape = (cfg.unroll_length + 1, cfg.batch_size)
    trajectory = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype), spec
    )
    weights: Any = jax.ShapeDtypeStruct((cfg.batch_size,), np.float32)
    return Batch(trajectory, weights)


def stored_spec(experiment: Experiment, spec: Transition) -> tuple[ReplayConfig, Transition]:
    """Returns the replay's config and the spec of its stored steps, for this `transition_spec`.

    They differ from the experiment's config and this spec where stacked frames are stored once.
    """
    stored = _Stored.of(experiment, spec)
    return stored.cfg, stored.spec


class _Stored(NamedTuple):
    """What a replay stores: whole steps, or steps whose stacked frames are split."""

    cfg: ReplayConfig
    spec: Transition
    stacks: FrameStacks | None

    @classmethod
    def of(cls, experiment: Experiment, spec: Transition) -> _Stored:
        cfg = _in_rounds(experiment)
        if not cfg.frame_stack:
            return cls(cfg, spec, None)
        stacks = FrameStacks(cfg, experiment.total_envs, spec)
        return cls(stacks.cfg, stacks.spec, stacks)

    def stacked(self, buffer: Any) -> Any:
        """Wraps a buffer or a writer, so that its users see whole stacks."""
        return buffer if self.stacks is None else StackedReplay(self.stacks, buffer)


def _in_rounds(experiment: Experiment) -> ReplayConfig:
    """Returns the config of the replay, with what rounds need in this program."""
    cfg = experiment.replay
    if not cfg.min_actors:
        return cfg
    # Room for one item of each environment that is late and one of the newest version. With less,
    # actors would wait for space and report late.
    cfg = dataclasses.replace(cfg, max_size=max(cfg.max_size, 2 * experiment.total_envs))
    if experiment.program.pacing == "lock_step":
        cfg = dataclasses.replace(cfg, grace_seconds=0.0)  # the barrier waits instead
    return cfg
