"""The launcher's process as its command sees it: how it starts, and how it ends.

Command and launcher import the same packages, which takes each of them a second or more. So `early`
starts a launcher before the command has imported anything, and `started` gives it a run later. This
module therefore imports almost nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from rlstack.programs.config.layouts import LAYOUTS, Layout
from rlstack.programs.program import supervisor
from rlstack.programs.program.launch import compiled
from rlstack.programs.session import module_path, timing

LOCAL = module_path.code_of("rlstack.programs.program.launch.local")
_WITHOUT_A_LAUNCHER = ("-h", "--help", "--dry-run", "--jobs")
_PIPE_BYTES = 2**20  # the most of a program that is sent while the launcher still imports


class _Early(NamedTuple):
    process: subprocess.Popen[bytes]
    output: IO[bytes]  # the file that it prints to until it has a run
    variables: dict[str, str]  # environment variables when the process started


_early: _Early | None = None


def is_needed(args: Sequence[str]) -> bool:
    """Whether `rlstack train` with these arguments will run nodes in processes.

    If the arguments do not tell, as with a config file, the answer is False.
    """
    given = dict(arg.partition("=")[::2] for arg in args if "=" in arg)
    given |= dict(zip(args, [*args[1:], ""], strict=True))
    launch = given.get("--launch", given.get("--program.launch", "processes"))
    here = not any(option in given for option in _WITHOUT_A_LAUNCHER)
    layout = LAYOUTS.get(given.get("--topology", ""), Layout())
    return here and layout.has_nodes and launch == "processes"


@contextlib.contextmanager
def early() -> Iterator[None]:
    """Starts a launcher before its run is known; if no run takes it, it ends with the body."""
    global _early
    with compiled.shared() as variables, tempfile.TemporaryFile() as output:
        _early = _Early(_start(LOCAL, "", output, variables), output, dict(os.environ))
        try:
            yield
        finally:
            if _early is not None:
                with _ending(_early.process):
                    _early = None


@contextlib.contextmanager
def started(code: str, run_dir: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a launcher's process, or uses the one of `early`; ends it at the end of the body.

    Args:
      code: Python code that the process runs.
      run_dir: the run directory.
      log: the file for the process's output.
    """
    global _early
    taken = _early if code == LOCAL else None
    if taken is not None:
        _early = None
        try:
            with _ending(taken.process):
                _tell(taken, run_dir, log)
                yield taken.process
        finally:
            taken.output.seek(0)
            with open(log, "ab") as file:
                shutil.copyfileobj(taken.output, file)
        return
    with compiled.shared() as variables:
        with open(log, "ab") as output:
            more = {**variables, "LAUNCHPAD_LOGGING_DIR": str(log.parent)}
            process = _start(code, str(run_dir), output, more)
        with _ending(process):
            yield process


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a launcher and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start(
    code: str, run_dir: str, output: IO[bytes], more_variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a launcher in a session of its own, so that Ctrl-C does not reach it directly."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, run_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
        start_new_session=True,
        env={
            **os.environ,
            **more_variables,
            "PYTHONPATH": module_path.for_children(),
            supervisor.PARENT: str(os.getpid()),
        },
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError, AttributeError):  # too many pipes, or not Linux
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return process


def _tell(early: _Early, run_dir: Path, log: Path) -> None:
    """Tells a launcher of its run, and what has changed since it started."""
    new = {k: v for k, v in os.environ.items() if early.variables.get(k) != v}
    new["PYTHONPATH"] = module_path.for_children()
    told = {"run_dir": str(run_dir), "log": str(log), "variables": new}
    assert early.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the launcher has ended; its output says why
        early.process.stdin.write(json.dumps(told).encode() + b"\n")
        early.process.stdin.flush()


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a launcher at the end of the body."""
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timing.INTERRUPTED)
        kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            # close() flushes the pipe. This fails because the launcher has ended.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
