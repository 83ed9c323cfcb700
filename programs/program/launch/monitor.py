"""Gives a launcher the status of its program, which a thread reads from the coordinator."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

from rlstack.programs.program.base import EVALUATING, OVER
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.failures import read_failures, restart_line, since_restart
from rlstack.programs.session import timing
from rlstack.programs.session.callbacks import MAX_WAITING, Callbacks, received
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import ClosedError, RemoteError, RemoteObject, UnavailableError, codec
from rlstack.storage import checkpoint


class ProgramMonitor:
    """Shows the coordinator's status on a display, and calls the coordinator for a launcher.

    Attributes:
      has_answered: True once the coordinator has answered.
    """

    def __init__(self, address: str, display: ProgressDisplay, failures: Path) -> None:
        """Starts the threads that show the program and call the callbacks.

        Args:
          address: address of the coordinator, which is asked for the status.
          display: shows the status.
          failures: the record of failures; each restart is shown as a line.
        """
        timeout = timing.DISPLAY_CALL
        self._coordinator = RemoteObject(address, Coordinator, name="coordinator", timeout=timeout)
        self._display, self._failures = display, failures
        self._checkpoints = RunDir(failures.parent).checkpoints
        self._shown = self._size = 0  # restarts shown, and the bytes of the record that had them
        self.has_answered = False
        self._heard = 0  # the number of the last event that was passed on
        self._saved: set[Path] = set(checkpoint.paths(self._checkpoints))
        self._noted = 0  # the number of the coordinator's last note that was shown
        self._closed = threading.Event()
        # Callbacks may take long, and must not delay what reads the coordinator, which ends.
        self._events: queue.SimpleQueue[tuple[str, int, Any] | None] = queue.SimpleQueue()
        targets = {"monitor": self._run, "callbacks": self._tell}
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def interrupt(self, signal_number: int) -> str:
        """Asks the coordinator to end the program.

        Returns:
          The phase from now on, or an empty string if the coordinator does not answer. If it has
          never answered, the program is still starting and has nothing to save: it is `OVER`.
        """
        if not self.has_answered:
            return OVER
        try:
            number = int(signal_number)
            timeout = timing.ASK_COORDINATOR
            return str(self._coordinator.call("interrupt", (number,), timeout=timeout))
        except (UnavailableError, RemoteError):
            return ""

    def phase(self) -> str:
        """Returns the program's phase, or an empty string if the coordinator does not answer."""
        try:
            status = self._coordinator.call("status", timeout=timing.ASK_COORDINATOR)
            return str(status["phase"])
        except (UnavailableError, RemoteError):
            return ""

    def relocate(self, node: str, address: str) -> bool:
        """Tells the coordinator a node's new address; returns whether it answered."""
        try:
            timeout = timing.TELL_COORDINATOR
            self._coordinator.call("relocate", (node, address), timeout=timeout)
            return True
        except (UnavailableError, RemoteError):
            return False

    def close(self) -> None:
        """Ends the threads, after the calls of callbacks that are left."""
        self._closed.set()
        self._coordinator.close()
        reader, teller = self._threads
        reader.join()
        self._show_restarts()
        self._hear_checkpoints()
        self._events.put(None)
        teller.join()

    def _show_restarts(self) -> None:
        size = self._failures.stat().st_size if self._failures.exists() else 0
        if size == self._size:
            return
        self._size, failures = size, since_restart(read_failures(self._failures))
        for failure in failures[self._shown :]:
            if failure["restarts"]:
                self._display.write_line(restart_line(failure))
        self._shown = len(failures)

    def _hear(self) -> None:
        """Passes what has happened on to the callbacks, and back to the program what they say."""
        listener = self._display.listener
        if listener is None:
            return
        if self._events.qsize() < MAX_WAITING:  # else the coordinator loses the oldest
            self._fetch(listener)
        self._hear_checkpoints()

    def _fetch(self, listener: Callbacks) -> None:
        for event in self._coordinator.events(self._heard, listener.reason):
            number, kind, where, content = codec.decode(event)
            if number > self._heard:
                self._heard = number
                self._events.put((kind, where, received(kind, content)))

    def _hear_checkpoints(self) -> None:
        listener = self._display.listener
        if listener is None:
            return
        new = set(checkpoint.paths(self._checkpoints)) - self._saved
        self._saved |= new
        for frames, path in sorted((checkpoint.step_of(path), path) for path in new):
            self._events.put(("checkpoint", frames, path))

    def _tell(self) -> None:
        """Calls the callbacks, in the order of the events."""
        while (event := self._events.get()) is not None:
            if self._display.listener is not None:
                self._display.listener(*event)

    def _run(self) -> None:
        while not self._closed.wait(timing.DISPLAY_PERIOD):
            self._show_restarts()
            try:
                status = self._coordinator.status()
                self._hear()
            except ClosedError:
                return
            except (UnavailableError, RemoteError):  # starting, or short of processor time
                continue
            self.has_answered = True
            for number, text in status["notes"]:
                if number > self._noted:
                    self._noted = number
                    self._display.write_line(text)
            self._display.write_nodes(status["nodes"])
            self._display.write_activity("evaluating" if status["phase"] == EVALUATING else "")
            self._display.write(status["env_frames"], status["logs"])
