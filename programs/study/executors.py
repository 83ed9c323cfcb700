"""Trains the runs of a set in separate processes, several at a time.

Each process trains a run or a set, with its output in a file. The processes end with this one: a
request to stop is passed on to them, and they save a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from rlstack.programs.program import supervisor
from rlstack.programs.session import module_path
from rlstack.programs.session.signals import Interrupted, StopSignals

_MAIN = module_path.code_of("rlstack.programs.study.child")
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


def check_jobs(jobs: int) -> None:
    """Checks the number of processes that train at the same time.

    Raises:
      ValueError: the number is less than 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1; got {jobs}.")


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


class Jobs:
    """Processes that train runs, each with a name; `close` ends those that still run."""

    def __init__(self, launch: Launch = here) -> None:
        self._launch = launch
        self._running: dict[str, tuple[Process, Path]] = {}
        self._kill_at: dict[str, float] = {}  # when a process that was asked to stop is killed

    def __len__(self) -> int:
        """Returns the number of processes that have not been seen to end."""
        return len(self._running)

    def start(self, name: str, log: Path, root: Path, run: str = "", **budgets: Any) -> None:
        """Starts a process.

        Args:
          name: the process's name, for `ended` and `stop`.
          log: the file to which the process's output is appended.
          root: the directory of a set.
          run: the name of the run that the process trains; "" for the whole set.
          **budgets: new budgets, by the name of the config field.
        """
        command = [sys.executable, "-c", _MAIN, str(root), run, json.dumps(budgets)]
        variables = {"PYTHONPATH": module_path.for_children()}
        self._running[name] = self._launch(command, variables, log), log

    def ended(self) -> list[tuple[str, str]]:
        """Returns the names and failures ("" for none) of processes that have ended since."""
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


def run(
    root: Path,
    names: Sequence[str],
    budgets: Mapping[str, Any],
    jobs: int,
    out: TextIO,
    launch: Launch = here,
) -> Iterator[tuple[str, str]]:
    """Trains runs of a set in processes; yields the name and the failure ("" for none) of each.

    Args:
      root: the directory of the set.
      names: names of the runs.
      budgets: new budgets, by name.
      jobs: number of processes at the same time.
      out: receives a line when a run starts.
      launch: starts a process.

    Raises:
      Interrupted: SIGINT or SIGTERM was received, and all processes have ended.
    """
    (root / "logs").mkdir(exist_ok=True)
    waiting = list(names)
    with StopSignals() as stop:
        with contextlib.closing(Jobs(launch)) as running:
            while (waiting or running) and stop.received is None:
                while waiting and len(running) < jobs:
                    name = waiting.pop(0)
                    log = root / "logs" / name
                    running.start(name, log, root, name, **budgets)
                    print(f"{name}: started; its output is in {log}", file=out, flush=True)
                time.sleep(_PERIOD)
                yield from running.ended()
        if stop.received is not None:
            raise Interrupted(stop.received)


def _failure(code: int, log: Path) -> str:
    """Returns why a process failed: the last line of its output; "" if it did not."""
    if code == 0:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1] if lines else "there is no output"
    return f"{supervisor.describe(code)}: {last}"
