"""A program of several nodes, from start to result: launched, watched, and cleared away."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from programs import launcher
from programs.components import announce_replay, make_env
from programs.coordinator import Coordinator
from programs.display import ProgressDisplay
from programs.experiment import Experiment
from programs.nodes.line import Setup
from programs.run_dir import RunDir
from programs.session import Interrupted, ProgramError, Result, Signals
from rlstack import checkpoint
from rlstack.remote import ClosedError, RemoteError, UnavailableError
from rlstack.rpc import RemoteObject
from rlstack.types import EnvSpec

_LOOK = 0.1  # seconds between two looks at the launcher
_SHOW = 0.5  # seconds between two looks at the coordinator
_PATIENCE = 20.0  # seconds after an interruption in which a program ends by itself


def run_program(
    experiment: Experiment, directory: RunDir, restored: Path | None, stream: TextIO | None
) -> Result:
    """Runs a topology of several nodes.

    Args:
      experiment: what to run.
      directory: where everything is filed.
      restored: the checkpoint to go on from, if any.
      stream: where progress is shown; standard error by default.

    Raises:
      ValueError: a package is missing, or the config contradicts itself or the environment.
      ProgramError: a node failed that cannot be restarted, or was restarted too often.
      Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    _check_packages(experiment)
    spec = _environment_spec(experiment)
    # An agent that does not fit, or too large a replay, is refused here, before any launch.
    setup = Setup(experiment, directory, spec, restored)
    announce_replay(experiment, setup.step, stream or sys.stderr)
    frames = checkpoint.read_metadata(restored)["env_frames"] if restored else 0
    directory.failures.unlink(missing_ok=True)
    directory.result.unlink(missing_ok=True)
    run = _run_threads if experiment.program.launch == "threads" else _run_processes
    display = ProgressDisplay(experiment.frames, stream or sys.stderr, start_frames=frames)
    with display:
        received = run(setup, display)
    if directory.result.exists():
        return Result(**json.loads(directory.result.read_text()))
    if received:
        raise Interrupted(received, saved=checkpoint.latest(directory.checkpoints) is not None)
    raise ProgramError(_first_failure(directory))


def _check_packages(experiment: Experiment) -> None:
    needed = {"launchpad", "courier"}
    if experiment.topology == "distributed":
        needed.add("reverb")
    missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if missing:
        raise ValueError(
            f"topology {experiment.topology}: it needs {', '.join(missing)}, which are for CPython "
            "3.10; not installed here. `make venv` sets that up; `rlstack doctor` tells more. "
            "--topology single_process works without."
        )


def _environment_spec(experiment: Experiment) -> EnvSpec:
    with make_env(dataclasses.replace(experiment.env, num_envs=1, wait_num=0), seed=0) as env:
        return env.spec


def _run_processes(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes under a launcher of their own; returns the signal that came, or 0."""
    with Signals() as signals, _launcher(setup.directory) as process:
        plan = launcher.plan(setup)  # while the launcher starts
        try:
            _send(plan.commands, process)
            _watch(process, plan.address, signals, display)
        finally:
            plan.forget()
        return signals.received or 0


def _watch(
    process: subprocess.Popen[bytes], address: str, signals: Signals, display: ProgressDisplay
) -> None:
    """Until the launcher ends; passes signals on."""
    watch: _Watch | None = None
    told = 0.0
    while process.poll() is None:
        if watch is None and _has_launched(process):
            watch = _Watch(address, display)
        if signals.received and not told:
            told = time.monotonic()
            if watch is None or not watch.interrupt(signals.received):
                process.terminate()
        if told and time.monotonic() > told + _PATIENCE:
            process.terminate()
            told = time.monotonic()
        time.sleep(_LOOK)
    if watch is not None:
        watch.close()


@contextlib.contextmanager
def _launcher(directory: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher's process, in a session of its own: a terminal's Ctrl-C is for us alone."""
    directory.node_logs.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "LAUNCHPAD_LOGGING_DIR": str(directory.node_logs),
    }
    with open(directory.node_logs / "launcher", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "programs.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        _sweep()


def _send(commands: list[dict[str, Any]], process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(commands).encode() + b"\n")


def _has_launched(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return bool(process.stdout.readline())


def _run_threads(setup: Setup, display: ProgressDisplay) -> int:
    """Runs the nodes in threads of this process; returns the signal that came, or 0."""
    received = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    manager, address = launcher.launch_threads(setup)
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)

        def receive(number: int, frame: Any, handler: Any = handler) -> None:
            received.append(number)
            handler(number, frame)

        signal.signal(number, receive)
    watch = _Watch(address, display)
    try:
        with contextlib.suppress(Exception):  # the nodes have written it down
            launcher.wait(manager)
    finally:
        manager.wait(raise_error=False)
        watch.close()
        launcher.forget(manager)
        for number, handler in before.items():
            signal.signal(number, handler)
    return received[0] if received else 0


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGALRM)


class _Watch:
    """Shows in a thread what the coordinator says."""

    def __init__(self, address: str, display: ProgressDisplay) -> None:
        self._remote = RemoteObject(address, Coordinator, name="coordinator", timeout=60.0)
        self._display = display
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def interrupt(self, number: int) -> bool:
        """Asks the coordinator for the end; says whether it heard."""
        try:
            self._remote.call("interrupt", (int(number),), timeout=3.0)
            return True
        except (UnavailableError, RemoteError):
            return False

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._remote.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(ClosedError, UnavailableError, RemoteError):
            while not self._closed.wait(_SHOW):
                status = self._remote.status()
                self._display.write_nodes(status["nodes"])
                self._display.write(status["env_frames"], status["logs"])


def _first_failure(directory: RunDir) -> str:
    """Returns what ended the program: the first failure after which there was no restart."""
    failures = []
    if directory.failures.exists():
        failures = [json.loads(line) for line in directory.failures.read_text().splitlines()]
    for failure in failures:
        if not failure["restarts"]:
            return (
                f"node {failure['node']} failed: {failure['reason']}. "
                f"What it printed is under {directory.node_logs}.\n"
                f"{failure.get('traceback', '')}".rstrip()
            )
    log = directory.node_logs / "launcher"
    told = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    return f"the program ended without a result; see {directory.node_logs}.\n{told}".rstrip()


def _sweep() -> None:
    """Removes what killed nodes left in shared memory."""
    from rlstack.replay.shared_memory import block

    block.sweep()
