"""The node of the Reverb server that holds a program's replay."""

from __future__ import annotations

import threading
import time

from programs import timing
from programs.components import cores
from programs.components.replay import stored_spec
from programs.components.saved_replays import SavedReplays
from programs.nodes.base import OVER, CoordinatorClient, Setup
from rlstack.rpc import RemoteObject


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
          setup: of the program.
          coordinator: a client of the coordinator, which says when the program is over.
          listen: the port and the IPv4 address to listen on.
          stop: set by the launcher to end this node.
        """
        experiment = setup.experiment
        if experiment.program.launch != "threads":
            cores.leave_one()
        from rlstack.replay.reverb import ReverbServer

        setup.configure_jax(single_thread=True)
        self._program = CoordinatorClient(coordinator, "replay", stop)
        self._stop = stop
        cfg, spec = stored_spec(experiment, setup.step)
        port, address = listen
        start_from = None
        if experiment.checkpoint_replay:
            saved = SavedReplays(setup.directory)
            saved.clean()  # what a failed save or a lost learner left
            start_from = saved.belonging_to(setup.restored)
        self._server = ReverbServer(
            cfg,
            experiment.total_envs,
            spec,
            port=port,
            checkpoint_dir=setup.directory.replay if experiment.checkpoint_replay else None,
            start_from=start_from,
            bind_address=address,
        )

    def run(self) -> None:
        """Serves until the program is over."""
        try:
            while self._program.poll().phase != OVER:
                self._stop.wait(timing.PHASE_POLL)
            if self._stop.is_set():  # the learner was stopped at the same time, and now saves
                time.sleep(timing.REPLAY_LINGER)
        finally:
            self._server.close()
