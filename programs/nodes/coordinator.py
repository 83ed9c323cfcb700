"""The coordinator's node: the last to leave, because the others learn from it that all is over."""

from __future__ import annotations

import threading

from programs.nodes.coordination import Coordinator
from programs.nodes.line import Setup
from rlstack.storage import checkpoint
from rlstack.storage.loggers import Fanout, JsonlLogger, TensorBoardLogger

_LINGER = 1.0  # seconds in which every node that lives reports a few times


class CoordinatorNode(Coordinator):
    """A `Coordinator` that runs until the program is over."""

    def __init__(self, setup: Setup, stop: threading.Event) -> None:
        directory = setup.directory
        self._logs = Fanout(
            [JsonlLogger(directory.metrics), TensorBoardLogger(directory.tensorboard)]
        )
        self._stop = stop
        frames = checkpoint.read_metadata(setup.restored)["env_frames"] if setup.restored else 0
        super().__init__(setup.experiment, directory, self._logs, frames)

    def run(self) -> None:
        """Waits for the end."""
        try:
            while not (self.wait_until_over(0.1) or self._stop.is_set()):
                pass
            self.wait_until_left(_LINGER)
        finally:
            self._logs.close()
