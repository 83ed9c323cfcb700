"""Calls between nodes and bare loops: `python -m benchmarks.transports [--quick] [--only TEXT]`.

One process serves, this one calls. For each transport that is installed and each size of a message:
calls of an `rlstack.rpc.RemoteObject` ("ours") and the same bytes sent and returned by the
transport's own library ("reference"), in alternation. For `direct` the reference hands the array to
another thread and back. For `zmq` it is a loop over two encrypted sockets without threads. Settings
with "8 callers" have as many threads with a call in progress each.

The ratio is of calls per second. The medians also have the median and the 99th percentile of a call
in ms, and MB/s of the messages of both ways.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from benchmarks import bare
from benchmarks.children import Child, answer, children, requests
from benchmarks.report import Result, alternate
from rlstack.rpc import RemoteObject, remote, serve, transports

NAME = "transports"
MODULE = "benchmarks.transports"
SIZES = {"200 B": 200, "30 kB": 30_000, "1 MB": 1_000_000}
_TIMEOUT = 30.0

Call = Callable[[], object]


class Setting(NamedTuple):
    """One comparison."""

    transport: str
    size: str  # of `SIZES`
    callers: int

    @property
    def name(self) -> str:
        """The transport, the size of a message and the number of callers."""
        return f"{self.transport}/{self.size}" + f"/{self.callers} callers" * (self.callers > 1)


SETTINGS = tuple(
    Setting(transport, size, callers)
    for transport in transports.TRANSPORTS
    if transports.is_installed(transport)
    for callers in (1, 8)
    for size in SIZES
)

QUICK = tuple(s for s in SETTINGS if s.callers == 1)


class Echo:
    """Returns what it is given."""

    @remote(idempotent=True)
    def echo(self, data: np.ndarray) -> np.ndarray:
        """Returns its argument."""
        return data


def measure(setting: Setting, seconds: float, repeats: int, result: Result) -> None:
    """Adds one comparison to a result."""
    data = np.zeros(SIZES[setting.size], np.uint8)
    with transports.chosen(setting.transport), contextlib.ExitStack() as stack:
        if setting.transport == "direct":
            ours_at, reference_at = stack.enter_context(serve(Echo())).address, ""
        else:
            (child,) = stack.enter_context(children(Child(MODULE, "--serve", setting.transport)))
            ours_at, reference_at = child.hear()
        times: dict[str, list[float]] = {"ours": [], "reference": []}
        client = stack.enter_context(RemoteObject(ours_at, Echo, name="echo", timeout=_TIMEOUT))
        ours: list[Call] = [lambda: client.echo(data)] * setting.callers
        reference = [
            stack.enter_context(_reference(setting.transport, reference_at, data))
            for _ in range(setting.callers)
        ]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(setting.callers))

        def rate(side: str, calls: list[Call], length: float) -> float:
            until = time.perf_counter() + length
            done = [pool.submit(_repeat, call, until) for call in calls]
            found = [future.result() for future in done]
            times[side].extend(x for part in found for x in part)
            return sum(len(part) for part in found) / length

        rate("ours", ours, 0.2)
        rate("reference", reference, 0.2)
        for found in times.values():
            found.clear()  # these included the connections
        comparison = alternate(
            lambda: rate("ours", ours, seconds),
            lambda: rate("reference", reference, seconds),
            repeats,
        )
    result.add(setting.name, comparison, {})
    for side, found in times.items():
        p50, p99 = (round(1e3 * float(np.percentile(found, p)), 4) for p in (50, 99))
        megabytes = round(2e-6 * len(data) * comparison.medians[side], 1)
        result.medians[setting.name] |= {
            f"{side}_latency_ms_p50": p50,
            f"{side}_latency_ms_p99": p99,
            f"{side}_mb_per_s": megabytes,
        }
        print(
            f"  {side}: p50 {p50:.3f} ms, p99 {p99:.3f} ms, {megabytes:.0f} MB/s", file=sys.stderr
        )


def _repeat(call: Call, until: float) -> list[float]:
    """Calls until a time; returns the seconds that each call took."""
    times = []
    while (start := time.perf_counter()) < until:
        call()
        times.append(time.perf_counter() - start)
    return times


def _reference(
    transport: str, address: str, data: np.ndarray
) -> contextlib.AbstractContextManager[Call]:
    return _bare_direct(data) if transport == "direct" else _bare(transport, address, data)


@contextlib.contextmanager
def _bare_direct(data: np.ndarray) -> Iterator[Call]:
    """Hands the array to another thread and back."""
    there: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
    back: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def run() -> None:
        while (found := there.get()) is not None:
            back.put(found)

    def call() -> object:
        there.put(data)
        return back.get()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield call
    finally:
        there.put(None)
        thread.join()


@contextlib.contextmanager
def _bare(transport: str, address: str, data: np.ndarray) -> Iterator[Call]:
    """Sends the bytes to a bare server."""
    message = data.tobytes()
    with bare.connect(transport, address) as client:

        def call() -> object:
            client.send(message)
            return client.receive()

        yield call


def _serve(transport: str) -> None:
    """Runs in the child: serves both sides until the parent closes the input."""
    with serve(Echo()) as server, bare.serve(transport, lambda message: message) as address:
        answer([server.address, address])
        for _ in requests():
            pass


def main(arguments: list[str] | None = None) -> None:
    """Measures; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in the name")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.serve:
        _serve(args.serve)
        return
    settings = [s for s in (QUICK if args.quick else SETTINGS) if args.only in s.name]
    if not settings:
        parser.error(f"--only: no setting has a name that contains {args.only!r}")
    result = Result.empty(NAME)
    for setting in settings:
        load = os.getloadavg()[0]
        print(f"{setting.name} (load {load:.1f}) ...", file=sys.stderr, flush=True)
        measure(setting, *((0.3, 3) if args.quick else (1.0, 9)), result)
    print(result.table(0.0))
    print(result.line())


if __name__ == "__main__":
    main()
