"""Processes that train the trials of a study, and the main function of such a process.

Each process trains a run or a study, with its output in a file. The processes end with this one: a
request to stop is passed on to them, and they save a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rlstack.programs.program import supervisor
from rlstack.programs.session import module_path, signals
from rlstack.programs.session.display import lasting
from rlstack.programs.session.signals import Interrupted, StopSignals

_MAIN = module_path.code_of("rlstack.programs.study.processes")
_PERIOD = 0.1  # seconds between two looks at the processes
_GRACE = 60.0  # seconds from the request to stop until a process is killed


class Process(Protocol):
    """A process, as `subprocess.Popen` describes it."""

    def poll(self) -> int | None:
        """Returns the exit code if the process has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises `subprocess.TimeoutExpired`."""

    def terminate(self) -> None:
        """Sends SIGTERM."""

    def kill(self) -> None:
        """Sends SIGKILL."""


# Starts a process with a command, environment variables and a file for its output.
Launch = Callable[[Sequence[str], Mapping[str, str], Path], Process]


def here(command: Sequence[str], variables: Mapping[str, str], log: Path) -> Process:
    """Starts a process on this machine, which can end with this process."""
    with open(log, "ab") as file:
        # In a session of its own, because Ctrl-C in the terminal must not reach it twice.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, supervisor.PARENT: str(os.getpid()), **variables},
            start_new_session=True,
        )


class Processes:
    """Processes that train runs or studies, each with a name."""

    def __init__(self, launch: Launch = here) -> None:
        self._launch = launch
        self._running: dict[str, tuple[Process, Path]] = {}
        self._kill_at: dict[str, float] = {}  # when a process that was asked to stop is killed

    def start(
        self,
        name: str,
        log: Path,
        root: Path,
        run: str = "",
        budgets: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Starts a process.

        Args:
          name: the process's name, for `run` and `stop`.
          log: the file to which the process's output is appended.
          root: the directory of a study.
          run: the name of the run that the process trains; "" for the whole study.
          budgets: new budgets, by the name of the config field.
        """
        command = [sys.executable, "-c", _MAIN, str(root), run, json.dumps(dict(budgets))]
        variables = {"PYTHONPATH": module_path.for_children()}
        log.parent.mkdir(exist_ok=True)
        self._running[name] = self._launch(command, variables, log), log

    def run(
        self, jobs: int, start_next: Callable[[], bool], look: Callable[[], object] = lambda: None
    ) -> Iterator[tuple[str, str]]:
        """Lets processes run until all have ended.

        Args:
          jobs: the number of processes at the same time.
          start_next: starts the next process, if it can; returns False if there is none left.
          look: called several times a second.

        Yields:
          The name and the failure ("" for none) of each process that has ended.

        Raises:
          Interrupted: SIGINT or SIGTERM was received, and all processes have ended.
        """
        with StopSignals() as stop:
            with contextlib.closing(self):
                while stop.received is None:
                    while len(self._running) < jobs and start_next():
                        pass
                    if not self._running:
                        break
                    time.sleep(_PERIOD)
                    look()
                    yield from self._ended()
            if stop.received is not None:
                raise Interrupted(stop.received)

    def _ended(self) -> list[tuple[str, str]]:
        now = time.monotonic()
        found = []
        for name, (process, log) in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[name]
                self._kill_at.pop(name, None)
                found.append((name, _failure(code, log)))
            elif now > self._kill_at.get(name, math.inf):
                process.kill()
        return found

    def stop(self, name: str) -> None:
        """Asks a process to save and end, and kills it if it still runs after a minute."""
        if name not in self._kill_at:
            self._running[name][0].terminate()
            self._kill_at[name] = time.monotonic() + _GRACE

    def close(self) -> None:
        """Asks all processes to save and end, and waits for them."""
        for name in self._running:
            self.stop(name)
        for name, (process, _) in self._running.items():
            try:
                process.wait(max(0.1, self._kill_at[name] - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _failure(code: int, log: Path) -> str:
    """Returns why a process failed: the last line of its output; "" if it did not."""
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else "there is no output"
    return f"{supervisor.describe(code)}: {last}"


def main() -> int:
    """Trains runs: its arguments are a study, a run ("" for the whole study), budgets as JSON."""
    root, name, budgets = sys.argv[1:4]
    supervisor.die_with_parent(signal.SIGTERM, supervisor.parent_id())
    signals.watch("train")
    module_path.arrange()
    from rlstack.programs.study import train  # after `watch`, because it takes seconds

    try:
        if name:
            train.train_run(root, name, json.loads(budgets))
        else:
            train.resume(root, json.loads(budgets), reports=False)
    except Interrupted as end:
        print(end, file=lasting())
        return end.exit_code
    return 0
