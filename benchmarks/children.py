"""Child processes of a benchmark: those that exchange lines of JSON with it, and single calls."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import psutil

Returned = TypeVar("Returned")

_PATIENCE = 30.0  # seconds for a child to end before it is killed


class Child:
    """A module that runs in a child process."""

    def __init__(self, module: str, *arguments: str):
        self._module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, value: object) -> None:
        """Sends one line."""
        assert self.process.stdin is not None
        print(json.dumps(value), file=self.process.stdin, flush=True)

    def hear(self) -> Any:
        """Waits for one line.

        Raises:
          RuntimeError: the child ended before it sent one; its output says why.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise RuntimeError(f"Child.hear: {self._module} ended with exit code {code}.")
        return json.loads(line)

    def close(self, signal_number: int | None = None) -> None:
        """Ends the child by closing its standard input, after a signal if one is given."""
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        if signal_number is not None:
            process.send_signal(signal_number)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        process.stdout.close()


@contextlib.contextmanager
def children(*started: Child) -> Iterator[tuple[Child, ...]]:
    """Ends the children at the end of the block."""
    try:
        yield started
    finally:
        for child in started:
            child.close()


def requests() -> Iterator[Any]:
    """In a child: yields the values that the parent sends, until it closes the input."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(value: object) -> None:
    """In a child: sends one line to the parent."""
    print(json.dumps(value), flush=True)


def cpu_seconds(process: psutil.Process) -> float:
    """Returns the processor time that a process has used, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


def in_new_process(function: Callable[..., Returned], *arguments: object) -> Returned:
    """Returns the result of a call in a new process, where JAX has not been used."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()
