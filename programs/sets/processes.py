"""Runs of a set in processes of their own, several at a time.

Each is a process of this machine that trains one run, with its output in a file. They end with this
process: a request to stop is passed on to them, and they save a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from programs import module_path
from programs.nodes import supervisor
from programs.tracking import signals
from programs.tracking.signals import Interrupted, StopSignals

# As `python -m programs.sets.processes`, which would find modules of the current directory first.
_MAIN = "import sys; del sys.path[0]; from programs.sets.processes import main; sys.exit(main())"
_PERIOD = 0.1  # seconds between two looks at the processes
_GRACE = 60.0  # seconds from the request to stop until a process is killed


def run(
    root: Path, names: Sequence[str], budgets: Mapping[str, Any], jobs: int, out: TextIO
) -> Iterator[tuple[str, str]]:
    """Trains runs of a set in processes; yields the name and the failure ("" for none) of each.

    Args:
      root: the directory of the set.
      names: of the runs.
      budgets: new budgets, by name.
      jobs: number of processes at the same time.
      out: receives a line when a run starts.

    Raises:
      Interrupted: SIGINT or SIGTERM was received, and all processes have ended.
    """
    (root / "logs").mkdir(exist_ok=True)
    waiting: list[str] = list(names)
    running: dict[str, subprocess.Popen[bytes]] = {}
    with StopSignals() as stop:
        try:
            while (waiting or running) and stop.received is None:
                while waiting and len(running) < jobs:
                    name = waiting.pop(0)
                    log = root / "logs" / name
                    running[name] = _start(root, name, budgets, log)
                    print(f"{name}: started; its output is in {log}", file=out, flush=True)
                time.sleep(_PERIOD)
                for name in [n for n, process in running.items() if process.poll() is not None]:
                    code = running.pop(name).returncode
                    yield name, _failure(code, root / "logs" / name)
        finally:
            _end(list(running.values()))
        if stop.received is not None:
            raise Interrupted(stop.received)


def main() -> int:
    """Trains one run of a set: its arguments are the set, the run and the budgets as JSON."""
    root, name, budgets = sys.argv[1:4]
    supervisor.die_with_parent(signal.SIGTERM, supervisor.parent_id())
    signals.watch("train")
    module_path.arrange()
    from programs.sets import train  # after `watch`, because it takes seconds

    try:
        train.train_one(root, name, json.loads(budgets))
    except Interrupted as end:
        print(end, file=sys.stderr)
        return end.exit_code
    return 0


def _start(root: Path, name: str, budgets: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
    arguments = [str(root), name, json.dumps(dict(budgets))]
    environment = {
        **os.environ,
        supervisor.PARENT: str(os.getpid()),
        "PYTHONPATH": module_path.for_children(),
    }
    with open(log, "ab") as file:
        # In a session of its own, because Ctrl-C in the terminal must not reach it twice.
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def _failure(code: int, log: Path) -> str:
    """Returns why a process failed: the last line of its output; "" if it did not."""
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "there is no output"
    return f"{supervisor.describe(code)}: {last}"


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    until = time.monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
