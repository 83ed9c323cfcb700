"""Processes on the hosts of a Ray cluster, for runs and trials of sweeps.

Ray places an actor for each process, and the actor starts it on its host. All hosts must see the
directory of the sweep at the same path.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.program.launch.ray import cluster
from rlstack.programs.study import executors as processes

_GROUP = "learner"  # a process reserves the resources of this group of nodes
_POLL = 0.5  # seconds between two looks at a process
_LOST = 255  # the exit code of a process whose host was lost


@contextlib.contextmanager
def launching(cfg: ProgramConfig) -> Iterator[Callable[..., RayProcess]]:
    """Joins a cluster, or starts one; yields a function that starts processes there.

    Args:
      cfg: the address of the cluster, and in `ray` the resources of a process: those of a learner.

    Raises:
      ValueError: Ray is not installed, or the cluster cannot be reached.
    """
    with cluster.joined(cfg) as ray:
        reserved = {**cluster.reserved(cfg.ray, _GROUP), "max_concurrency": 1}

        def launch(command: Sequence[str], variables: Mapping[str, str], log: Path) -> RayProcess:
            return RayProcess(ray, reserved, command, variables, log)

        yield launch


class RayProcess:
    """A process on some host, used like a `subprocess.Popen`."""

    def __init__(
        self,
        ray: Any,
        reserved: Mapping[str, Any],
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
    ) -> None:
        self._ray, self._log = ray, log
        self._code: int | None = None
        self._actor = ray.remote(_Host).options(**reserved, scheduling_strategy="SPREAD").remote()
        self._call = self._actor.start.remote(list(command), dict(variables), str(log))

    def poll(self) -> int | None:
        """Returns the exit code if the process has ended; None also while it has no host."""
        if self._code is None and self._ray.wait([self._call], timeout=0)[0]:
            try:
                self._code = self._ray.get(self._call)
            except self._ray.exceptions.RayError as error:
                self._code = _LOST
                with open(self._log, "a") as file:
                    print(f"its host was lost: {' '.join(str(error).split())[:300]}", file=file)
            if self._code is None:
                self._call = self._actor.poll.remote()
            else:
                self._ray.kill(self._actor)  # which frees its resources
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
          subprocess.TimeoutExpired: the process still runs.
        """
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self._log), timeout or 0.0)
            time.sleep(0.05)
        return code

    def terminate(self) -> None:
        """Asks the process to save and end."""
        if self.poll() is None:
            self._actor.terminate.remote()

    def kill(self) -> None:
        """Ends the process, and its actor if that does not answer."""
        if self.poll() is None:
            self._code = -int(signal.SIGKILL)
            self._ray.kill(self._actor)  # the process ends with it


class _Host:
    """Runs one process on the host of this actor."""

    def __init__(self) -> None:
        self._process: processes.Process | None = None

    def start(self, command: list[str], variables: dict[str, str], log: str) -> int | None:
        """Starts the process; returns what `poll` does."""
        self._process = processes.here(command, variables, Path(log))
        return self.poll()

    def poll(self) -> int | None:
        """Returns the exit code; None if the process still runs after a moment."""
        assert self._process is not None
        try:
            return self._process.wait(_POLL)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Asks the process to save and end."""
        if self._process is not None:
            self._process.terminate()
