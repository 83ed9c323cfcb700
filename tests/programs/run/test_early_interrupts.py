"""Ctrl-C at many moments before the first update: one line, no traceback, nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# Moments in seconds after the start: while Python imports, JAX starts, and XLA compiles.
FEW = (0.4, pytest.param(1.5, marks=[pytest.mark.slow, pytest.mark.chosen]))
MANY = (0.6, 1.0, 1.6, 2.2, 2.8, 3.4, 4.2, 5.0, 6.0)
WORKERS = ("--env.type", "process", "--env.num-workers", "2")


def catches_interrupts(pid):
    """Whether a process has a handler for Ctrl-C; without one, the system ends it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (signal.SIGINT - 1) & 1)


def interrupt(tmp_path, moment, *options):
    """Presses Ctrl-C in a new run; returns its exit code, what it said, and what it left."""
    command = [sys.executable, "-m", "rlstack", "train", "cartpole-ppo", *options]
    command += ["--frames", "100000000", "--run-dir", str(tmp_path / f"run-{moment}")]
    temporary = tmp_path / f"temporary-{moment}"
    temporary.mkdir()
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        while not catches_interrupts(process.pid):  # Python starts late on a busy machine
            time.sleep(0.01)
        time.sleep(moment)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=20)
        _, left = psutil.wait_procs(children, timeout=10)
    finally:
        process.kill()
    return process.returncode, said, [*left, *temporary.rglob("*")]


def check(tmp_path, moment, *options):
    code, said, left = interrupt(tmp_path, moment, *options)
    assert code == 130, said
    lines = [line for line in said.splitlines() if not line.startswith(("replay: ", "frames "))]
    lines = [line for line in lines if not line.endswith(" ...")]  # what takes long
    assert len(lines) == 1, said
    assert lines[0].startswith("rlstack train: stopped by SIGINT; "), said
    assert left == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("moment", FEW)
def test_an_early_interrupt_is_one_line(tmp_path, moment):
    check(tmp_path, moment, *WORKERS)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("options", [(), pytest.param(WORKERS, marks=pytest.mark.chosen)])
def test_an_interrupt_at_any_early_moment_is_one_line(tmp_path, options):
    for moment in MANY:
        check(tmp_path, moment, *options)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200, method="thread")
@pytest.mark.parametrize("topology", ["light_env", "distributed"])
def test_an_early_interrupt_of_a_program_is_one_line(tmp_path, topology):
    for moment in (0.6, 3.0, 4.5, 6.0):
        check(tmp_path, moment, "--topology", topology, "--program.num-actors", "2")
