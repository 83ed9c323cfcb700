"""The sides of a program's replay: how the learner opens it and how actors find it."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from programs.build import cores
from programs.build.components import as_stored, make_stacked
from programs.build.seeds import role_seed
from programs.nodes.coordination import OVER
from programs.nodes.line import Coordinates, Line, Setup
from rlstack.replay import ReplayBuffer, ReplayConfig
from rlstack.types import PyTree, Transition

_LINGER = 3.0  # seconds in which a learner that is told to end saves the server's content


class Reads(Protocol):
    """The learner's side."""

    name: str  # by which actors find it, where it is in memory; else ""

    @property
    def buffer(self) -> ReplayBuffer:
        """The replay."""

    def save(self) -> PyTree:
        """Returns what of the replay belongs into a checkpoint."""

    def load(self, saved: PyTree) -> None:
        """Takes back what `save` returned."""


class OpensReplay(Protocol):
    """Where a learner reads."""

    def reader(self) -> Reads:
        """Opens the learner's side."""


class SharedMemory:
    """Replay in memory that the learner owns; actors ask the learner for its name."""

    def __init__(self, setup: Setup) -> None:
        """Takes the program's setup; nothing is opened here."""
        self._setup = setup

    def reader(self) -> Reads:
        """Makes the buffer."""
        return _SharedMemoryReader(self._setup)

    def writer(self, rank: int, learner: Any) -> Any:
        """Finds the buffer; ids are the actor's own."""
        from rlstack.replay.shared_memory import SharedMemHandle

        experiment, name = self._setup.experiment, learner.replay_name()

        def find(cfg: ReplayConfig, spec: Transition) -> Any:
            handle = SharedMemHandle(name, cfg, experiment.total_envs, spec)
            return handle.writer(rank, experiment.num_actors)

        return make_stacked(experiment, self._setup.step, find)


class _SharedMemoryReader:
    def __init__(self, setup: Setup) -> None:
        from rlstack.replay.shared_memory import SharedMemReplayBuffer

        experiment = setup.experiment

        def make(cfg: ReplayConfig, spec: Transition) -> SharedMemReplayBuffer:
            buffer = SharedMemReplayBuffer(
                cfg,
                experiment.total_envs,
                seed=role_seed(experiment.seed, "replay"),
                spec=spec,
                num_actors=experiment.num_actors,
            )
            self.name = buffer.handle().name
            return buffer

        self.buffer = make_stacked(experiment, setup.step, make)

    def save(self) -> PyTree:
        return self.buffer.save()

    def load(self, saved: PyTree) -> None:
        self.buffer.load(saved)


class Reverb:
    """Replay on a Reverb server, found by its address alone."""

    def __init__(self, setup: Setup, address: str) -> None:
        """Takes the program's setup and where the server listens."""
        self._setup, self._address = setup, address

    def reader(self) -> Reads:
        """Connects the learner."""
        return _ReverbReader(self._buffer())

    def writer(self, rank: int, learner: Any) -> Any:
        """Connects an actor; ids are those of the whole program."""
        del learner
        num_envs = self._setup.experiment.env.num_envs
        return self._buffer(range(rank * num_envs, (rank + 1) * num_envs))

    def _buffer(self, env_ids: range | None = None) -> Any:
        from rlstack.replay.reverb import ReverbReplayBuffer

        experiment = self._setup.experiment
        prefetch, max_pending = None, 64
        if experiment.program.pacing == "lock_step":
            # What was added must be there, and nothing be taken before its time.
            prefetch = max_pending = 0
        elif experiment.replay.sampler == "fifo":
            # What is under way grows old as what waits in the queue does.
            prefetch, max_pending = experiment.replay.batch_size, experiment.env.num_envs

        def connect(cfg: ReplayConfig, spec: Transition) -> ReverbReplayBuffer:
            return ReverbReplayBuffer(
                cfg,
                experiment.total_envs,
                self._address,
                spec,
                env_ids=env_ids,
                num_actors=experiment.num_actors,
                prefetch=prefetch,
                max_pending=max_pending,
            )

        return make_stacked(experiment, self._setup.step, connect)


class _ReverbReader:
    """The server keeps its own checkpoints, in the run's directory, and begins with the newest."""

    name = ""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def save(self) -> PyTree:
        getattr(self.buffer, "stored", self.buffer).checkpoint()
        return ()

    def load(self, saved: PyTree) -> None:
        del saved


class ReverbNode:
    """The server's node."""

    def __init__(
        self,
        setup: Setup,
        listen: tuple[int, str],
        coordinator: Coordinates,
        stop: threading.Event,
    ) -> None:
        """Starts to serve, with the contents of the newest checkpoint if there is one.

        Args:
          setup: of the program.
          listen: the port, and the address of this host at which to answer.
          coordinator: who says when all is over.
          stop: set by the launcher to end this node.
        """
        experiment = setup.experiment
        if experiment.program.launch != "threads":
            cores.leave_one()
        from rlstack.replay.reverb import ReverbServer

        setup.configure_jax(single_thread=True)
        self._line = Line(coordinator, "replay", stop)
        self._stop = stop
        directory = setup.directory.replay if experiment.checkpoint_replay else None
        cfg, spec = as_stored(experiment, setup.step)
        port, bind_address = listen
        self._server = ReverbServer(
            cfg,
            experiment.total_envs,
            spec,
            port=port,
            checkpoint_dir=directory,
            bind_address=bind_address,
        )

    def run(self) -> None:
        """Serves until all is over."""
        try:
            while self._line.ask().phase != OVER:
                self._stop.wait(0.1)
            if self._stop.is_set():  # the learner was told just now, too, and saves
                time.sleep(_LINGER)
        finally:
            self._server.close()
