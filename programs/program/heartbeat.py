"""Signs of life: a node sends them while it is busy, and the coordinator misses a learner's."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterable

from rlstack.programs.program.stopping import NodeLostError
from rlstack.programs.session import timing
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


class Silences:
    """Measures how long nodes have been silent, counting only time in which this process ran."""

    def __init__(self) -> None:
        """Knows no node."""
        self._seconds: dict[str, float] = {}

    def hear(self, node: str) -> None:
        """Records a sign of life of a node."""
        self._seconds[node] = 0.0

    def of(self, node: str) -> float:
        """Returns the seconds that a node has been silent; 0 for a node without a count."""
        return self._seconds.get(node, 0.0)

    def count(self, nodes: Iterable[str], passed: float) -> None:
        """Adds the time since the last call to the silence of some nodes.

        Args:
          nodes: the names of the nodes.
          passed: seconds since the last call. At most one report period counts: a longer time means
            that this process was stopped itself.
        """
        for name in nodes:
            self._seconds[name] += min(passed, timing.REPORT_PERIOD)

    def check(self, nodes: Iterable[str]) -> None:
        """Checks that none of these nodes has been silent for too long.

        Raises:
          NodeLostError: a node has been silent for too long.
        """
        for name in nodes:
            if self._seconds[name] > timing.LEARNER_LOST:
                raise NodeLostError(
                    name,
                    f"it has not reported for {self._seconds[name]:.0f} s; it, or its host, "
                    "hangs or was stopped",
                )
