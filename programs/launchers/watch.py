"""What a launcher sees of its program: the coordinator's status, in a thread."""

from __future__ import annotations

import threading

from programs.nodes.coordination import OVER, Coordinator
from programs.tracking.display import ProgressDisplay
from rlstack.rpc import ClosedError, RemoteError, RemoteObject, UnavailableError

_SHOW = 0.5  # seconds between two looks at the coordinator


class Watch:
    """Shows in a thread what the coordinator says."""

    def __init__(self, address: str, display: ProgressDisplay) -> None:
        """Begins to ask at the coordinator's address."""
        self._remote = RemoteObject(address, Coordinator, name="coordinator", timeout=60.0)
        self._display = display
        self._heard = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def interrupt(self, number: int) -> str:
        """Asks the coordinator for the end; returns the phase now, nothing if it is silent.

        One that was never heard has still to start: the program is over, with nothing to save.
        """
        if not self._heard:
            return OVER
        try:
            return str(self._remote.call("interrupt", (int(number),), timeout=2.0))
        except (UnavailableError, RemoteError):
            return ""

    def phase(self) -> str:
        """Asks in which phase the program is; returns nothing if the coordinator is silent."""
        try:
            return str(self._remote.call("status", timeout=2.0)["phase"])
        except (UnavailableError, RemoteError):
            return ""

    def relocate(self, node: str, address: str) -> bool:
        """Tells the coordinator where a node answers now; says whether it heard."""
        try:
            self._remote.call("relocate", (node, address), timeout=1.0)
            return True
        except (UnavailableError, RemoteError):
            return False

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._remote.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_SHOW):
            try:
                status = self._remote.status()
            except ClosedError:
                return
            except (UnavailableError, RemoteError):  # it may be starting, or starved, for long
                continue
            self._heard = True
            self._display.write_nodes(status["nodes"])
            self._display.write(status["env_frames"], status["logs"])
