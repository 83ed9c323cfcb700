"""A thread that tells the coordinator that its node is alive, also while the node is busy."""

from __future__ import annotations

import contextlib
import copy
import threading

from programs import timing
from rlstack.rpc import ClosedError, RemoteError, RemoteObject, UnavailableError


class Heartbeat:
    """Sends a sign of life with a fixed period until it is closed."""

    def __init__(self, coordinator: RemoteObject, node: str) -> None:
        """Starts the thread.

        Args:
          coordinator: a client of the coordinator.
          node: the name of this node.
        """
        self._coordinator = copy.copy(coordinator)  # its own client, which can be closed
        self._node = node
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and its call in progress."""
        self._closed.set()
        self._coordinator.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(timing.HEARTBEAT):
            # Without an answer there is nothing to do here: the node's own reports notice it.
            with contextlib.suppress(UnavailableError, RemoteError, ClosedError):
                self._coordinator.call("alive", (self._node,), timeout=timing.HEARTBEAT)
