"""The node that holds a program's replay: a Reverb server, or a table of rlstack's own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from rlstack.programs.build.replay import stored_spec
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.program.base import OVER, CoordinatorClient, Setup
from rlstack.programs.program.data_parallel import shards
from rlstack.programs.program.replay_sides import ProgramReplay, TableReplay
from rlstack.programs.program.saved_replays import SavedReplays
from rlstack.programs.session import timing
from rlstack.replay.served import ReplayService
from rlstack.rpc import RemoteObject


def leave_one_core() -> None:
    """Gives up one of this process's processors, if it has several.

    Use it in a node with many threads that wake one another. On few processors they disturb the
    learner, whose single thread computes all the time. On two processors, a learner of small
    networks then makes 10% to 40% more updates. This applies to the calling thread and to threads
    that it starts later, on operating systems that support it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    if len(allowed) > 1:
        os.sched_setaffinity(0, allowed - {min(allowed)})


class ReverbNode:
    """A Reverb server."""

    def __init__(
        self,
        setup: Setup,
        coordinator: RemoteObject,
        listen: tuple[int, str],
        stop: threading.Event,
    ) -> None:
        """Starts the server, with the contents that belong to the learner's checkpoint if any.

        Args:
          setup: the program's setup.
          coordinator: a client of the coordinator, which says when the program is over.
          listen: the port and the address to listen on.
          stop: set by the launcher to end this node.
        """
        experiment = setup.experiment
        if experiment.program.launch != "threads":
            leave_one_core()
        from rlstack.replay.reverb import ReverbServer

        setup.configure_jax(single_thread=True)
        self._program = CoordinatorClient(coordinator, setup.node("replay"), stop)
        self._stop = stop
        cfg, spec = stored_spec(experiment, setup.step)
        port, address = listen
        self._server = ReverbServer(
            cfg,
            experiment.total_envs,
            spec,
            port=port,
            checkpoint_dir=_checkpoint_dir(setup),
            start_from=_start_from(setup, "reverb"),
            bind_address=address,
        )

    def run(self) -> None:
        """Serves until the program is over."""
        try:
            _wait_for_end(self._program, self._stop)
        finally:
            self._server.close()


class TableNode(ReplayService):
    """A replay service of rlstack's own, which draws with the experiment's seed."""

    def __init__(self, setup: Setup, coordinator: RemoteObject, stop: threading.Event) -> None:
        """Makes the table, with the contents that belong to the learner's checkpoint if any.

        Args:
          setup: the program's setup, or the one of a learner process's share if there are several.
          coordinator: a client of the coordinator, which says when the program is over.
          stop: set by the launcher to end this node.
        """
        setup.configure_jax(single_thread=True)
        experiment = setup.experiment
        self._program = CoordinatorClient(coordinator, shards.name_of(setup, "replay"), stop)
        self._stop = stop
        cfg, spec = stored_spec(experiment, setup.step)
        start_from = _start_from(setup, "table")
        with self._program.phase("reading the replay" if start_from else "making the replay"):
            super().__init__(
                cfg,
                experiment.total_envs,
                seed=role_seed(experiment.seed, "replay"),
                spec=spec,
                num_actors=experiment.num_actors,
                checkpoint_dir=_checkpoint_dir(setup),
                start_from=start_from,
            )

    def run(self) -> None:
        """Serves until the program is over."""
        try:
            _wait_for_end(self._program, self._stop)
        finally:
            self.close()


def program_replay(setup: Setup, replay: ProgramReplay | RemoteObject) -> ProgramReplay:
    """Returns the replay that a node was given: itself, or as a client of a `TableNode`."""
    if isinstance(replay, RemoteObject):
        return TableReplay(setup.experiment, setup.step, saved_replays(setup), replay)
    return replay


def saved_replays(setup: Setup) -> SavedReplays:
    """Returns the checkpoints of the policy's replay service."""
    return SavedReplays(setup.directory, setup.policy)


def _checkpoint_dir(setup: Setup) -> Path | None:
    directory = setup.directory.replay / setup.policy
    return directory if setup.experiment.checkpoint_replay else None


def _start_from(setup: Setup, service: str) -> Path | None:
    """Returns the checkpoint of the replay to start from, after removing those that are none."""
    if not setup.experiment.checkpoint_replay:
        return None
    saved = saved_replays(setup)
    saved.clean()  # what a failed save or a lost learner left
    return saved.belonging_to(setup.restored, service)


def _wait_for_end(program: CoordinatorClient, stop: threading.Event) -> None:
    """Waits until the program is over, or until this node is to end and the learner has saved."""
    while program.poll().phase != OVER:
        stop.wait(timing.PHASE_POLL)
    if stop.is_set():  # the learner was stopped at the same time, and now saves
        time.sleep(timing.REPLAY_LINGER)
