"""Trials on other hosts: processes of a Ray cluster, and the script of a Slurm job array.

Ray places an actor for each process, and the actor starts it on its host. The tasks of a Slurm
array are commands that work on one study at the same time. All hosts must see the directory of the
study at the same path.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.program.launch.ray import cluster
from rlstack.programs.study import processes

SLURM_FILE = "slurm.sh"
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{tasks}{limit}
#SBATCH --output={output}
#SBATCH --signal=B:TERM@120
# Two minutes before its time limit a task saves and ends; submit the script again to continue.
cd {here}
exec {python} -m rlstack sweep --resume {root}{options}
"""
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


def write_array(root: Path, tasks: int, *, divided: bool, at_once: int = 0) -> str:
    """Writes the script to the directory of a study, and returns it.

    Args:
      root: the directory of the study, on a file system that all nodes share.
      tasks: the number of tasks.
      divided: True if each task trains a part of a grid; False if each task adds trials to a
        search until there are enough.
      at_once: maximum number of tasks that run at the same time; 0 for no limit.
    """
    text = _SCRIPT.format(
        name=shlex.quote(root.name),
        tasks=tasks,
        limit=f"%{at_once}" if at_once else "",
        output=shlex.quote(f"{root}/slurm-%A_%a.out"),
        here=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
        root=shlex.quote(str(root)),
        options=f' --task "$SLURM_ARRAY_TASK_ID/{tasks}"' if divided else "",
    )
    (root / SLURM_FILE).write_text(text)
    return text


def submit_array(root: Path) -> str:
    """Gives the script to Slurm; returns the answer of sbatch.

    Raises:
      ValueError: there is no sbatch, or it refuses the script.
    """
    command = ["sbatch", str(root / SLURM_FILE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise ValueError(
            "Study: sbatch, which --submit needs, is not on PATH. Leave out --submit, and submit "
            f"{root / SLURM_FILE} where Slurm is."
        ) from None
    if done.returncode:
        raise ValueError(f"Study: sbatch refused {root / SLURM_FILE}: {done.stderr.strip()}")
    return done.stdout.strip()
