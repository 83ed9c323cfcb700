"""The two sides of the replay of a program: the learner reads, the actors write.

It is in shared memory, or in a node of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from rlstack.programs.build.replay import Stored
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.program.saved_replays import SavedReplays, Server
from rlstack.replay import ReplayBuffer, SharedMemHandle, SharedMemReplayBuffer
from rlstack.replay.served import ServedReplayBuffer
from rlstack.replay.served.calls import Caller
from rlstack.storage import checkpoint
from rlstack.types import PyTree, Transition

if TYPE_CHECKING:
    from rlstack.replay.reverb import ReverbReplayBuffer

Access = TypeVar("Access")  # to a server: its address, or a client of it


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
    name: str = ""  # name of the replay's shared memory, by which actors open it


class ProgramReplay(Protocol):
    """The replay of a program of several nodes; every node opens its own side."""

    def reader(self) -> LearnerReplay:
        """Opens the learner's side."""

    def writer(self, rank: int, find_memory: Callable[[], str]) -> ReplayWriter:
        """Opens the writer of an actor.

        Args:
          rank: rank of the actor.
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
        stored = Stored.of(experiment, self._spec)
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
        stored = Stored.of(experiment, self._spec)
        handle = SharedMemHandle(find_memory(), stored.cfg, experiment.total_envs, stored.spec)
        return stored.stacked(handle.writer(rank, experiment.num_actors))


class _OnServer(Generic[Access]):
    """Replay on a server, which writes its own checkpoints and starts from one."""

    def __init__(
        self, experiment: Experiment, spec: Transition, saved: SavedReplays, server: Access
    ) -> None:
        """Stores the arguments; the connection is opened later.

        Args:
          experiment: the experiment, which configures the replay.
          spec: the spec of one environment's step.
          saved: the checkpoints of the server.
          server: the server's address, or a client that is used for this replay only.
        """
        self._experiment, self._spec = experiment, spec
        self._saved, self._server = saved, server

    def reader(self) -> LearnerReplay:
        """Connects the learner."""
        stored = Stored.of(self._experiment, self._spec)
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
        stored = Stored.of(self._experiment, self._spec)
        return stored.stacked(self._connect(stored, self._experiment.env_ids(rank)))

    def _connect(self, stored: Stored, env_ids: range | None = None) -> Server:
        """Connects a learner, or an actor with these environments."""
        raise NotImplementedError


class ReverbReplay(_OnServer[str]):
    """Replay on a Reverb server, found by its address."""

    def _connect(self, stored: Stored, env_ids: range | None = None) -> ReverbReplayBuffer:
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

    def _connect(self, stored: Stored, env_ids: range | None = None) -> ServedReplayBuffer:
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
