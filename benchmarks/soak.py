"""Runs programs for a long time and checks that no process of theirs grows.

    python -m benchmarks.soak                       # 30 minutes of distributed, and of light_env
    python -m benchmarks.soak --minutes 5 --topologies light_env --keep soaks

Every few seconds it reads the memory, shared memory, threads, file descriptors and log of each
process of a program. After the first third of the time, in which replay and caches fill, a straight
line is fitted to each. The command prints the slopes, and fails if one of them grows by more than
noise, if a process was restarted, or if the program ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

_PERIOD = 2.0  # seconds between two samples
_START = 180.0  # seconds for all nodes to start
_END = 30.0  # seconds for the program to save and end

# The quantities, and the growth in the measured time that is noise: caches of the allocator and of
# the interpreter, threads that answer calls, connections.
ALLOWED = {"memory MB": 3.0, "shared MB": 1.0, "threads": 2.0, "descriptors": 3.0, "log kB": 20.0}
_SHARE = 0.02  # growth by this share of the mean is noise too
_TRAIN = (
    "cartpole-ppo", "--program.num-actors", "4", "--program.num-inferencers", "2",
    "--frames", "1000000000000", "--log-period", "50000", "--evaluator.period", "50000",
    # Reverb prints a line for each checkpoint; rarer ones are too few lines to count as growth.
    "--checkpoint-period", "200000", "--replay.max-size", "64",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slope:
    """How a quantity of a process grew."""

    process: str
    quantity: str
    mean: float
    per_hour: float
    growth: float  # of the fitted line, in the measured time

    @property
    def is_flat(self) -> bool:
        """Whether the growth is noise."""
        return self.growth <= ALLOWED[self.quantity] + _SHARE * self.mean


def fit(process: str, quantity: str, seconds: np.ndarray, values: np.ndarray) -> Slope:
    """Fits a straight line.

    Args:
      process: the name of the process.
      quantity: the name of the quantity.
      seconds: ``[N]``, the times of the samples.
      values: ``[N]``, the samples.
    """
    slope = float(np.polyfit(seconds - seconds[0], values, 1)[0])
    growth = slope * float(seconds[-1] - seconds[0])
    return Slope(process, quantity, float(values.mean()), slope * 3600, growth)


class Soak:
    """The samples of one program.

    Attributes:
      restarted: the names of processes that were replaced.
    """

    def __init__(self, run_dir: Path, root: int) -> None:
        self._run_dir, self._root = run_dir, psutil.Process(root)
        self._samples: dict[str, list[tuple[float, ...]]] = {}
        self._pids: dict[str, int] = {}
        self.restarted: set[str] = set()

    def sample(self) -> None:
        """Reads all processes that run now."""
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                title = " ".join(process.cmdline()).strip()
                name = re.fullmatch(rf"rlstack: (\S+) {re.escape(str(self._run_dir))}", title)
                if name is None:
                    continue
                values = self._read(process.pid, name[1])
            except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                continue
            if self._pids.setdefault(name[1], process.pid) != process.pid:
                self.restarted.add(name[1])
                self._pids[name[1]] = process.pid
            self._samples.setdefault(name[1], []).append((time.monotonic(), *values))

    def slopes(self) -> list[Slope]:
        """Returns the slopes of all quantities of all processes after the first third."""
        found = []
        for name, rows in self._samples.items():
            table = np.array(rows[len(rows) // 3 :])
            if len(table) >= 3:
                columns = zip(ALLOWED, table.T[1:], strict=True)
                found += [fit(name, quantity, table[:, 0], values) for quantity, values in columns]
        return found

    def write(self, path: Path) -> None:
        """Writes the samples: for each process, rows of the time and of the quantities."""
        path.write_text(json.dumps({"columns": ["seconds", *ALLOWED], **self._samples}))

    def _read(self, pid: int, name: str) -> tuple[float, ...]:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        group, _, index = name.partition("/")
        log = self._run_dir / "logs" / group / (index or "0")
        return (
            int(status["RssAnon"].split()[0]) / 1024,
            int(status["RssShmem"].split()[0]) / 1024,
            float(status["Threads"]),
            float(len(os.listdir(f"/proc/{pid}/fd"))),
            log.stat().st_size / 1024 if log.is_file() else 0.0,
        )


def soak(topology: str, minutes: float, run_dir: Path) -> list[str]:
    """Runs one program; prints its slopes, and returns what is wrong."""
    arguments = [*_TRAIN, "--topology", topology, "--run-dir", str(run_dir)]
    command = [sys.executable, "-m", "rlstack", "train", *arguments]
    with open(run_dir.with_suffix(".output"), "w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        samples = Soak(run_dir, process.pid)
        try:
            begun = time.monotonic()
            while not _has_learned(run_dir) and process.poll() is None:
                if time.monotonic() > begun + _START:
                    return [f"{topology}: no update within {_START:g} s"]
                time.sleep(_PERIOD)
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until and process.poll() is None:
                samples.sample()
                time.sleep(_PERIOD)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END)
            code = process.poll()
        finally:
            process.kill()
            process.wait()
    samples.write(run_dir.with_suffix(".samples.json"))
    slopes = samples.slopes()
    _print(topology, slopes)
    wrong = [f"{topology}: {s.process}: {s.quantity} grows" for s in slopes if not s.is_flat]
    wrong += [f"{topology}: {name} was restarted" for name in sorted(samples.restarted)]
    if code is None:
        wrong.append(f"{topology}: it did not end within {_END:g} s")
    elif code != 128 + signal.SIGINT:
        text = run_dir.with_suffix(".output").read_text()[-2000:]
        wrong.append(f"{topology}: it ended with exit code {code}: {text}")
    return wrong


def _has_learned(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and "learner/loss" in metrics.read_text()


def _print(topology: str, slopes: list[Slope]) -> None:
    print(f"{topology:24}{'quantity':14}{'mean':>10}{'per hour':>12}{'growth':>10}")
    for slope in slopes:
        if slope.process.startswith("supervisor:") and slope.is_flat:
            continue
        numbers = f"{slope.mean:>10.1f}{slope.per_hour:>12.2f}{slope.growth:>10.2f}"
        verdict = "" if slope.is_flat else "  grows"
        print(f"{slope.process:24}{slope.quantity:14}{numbers}{verdict}")
    print(flush=True)


def main() -> int:
    """Runs the programs one after the other; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0, help="for each topology")
    parser.add_argument("--keep", metavar="DIR", help="directory for the runs and the samples")
    parser.add_argument("--topologies", nargs="+", default=["distributed", "light_env"])
    chosen = parser.parse_args()
    wrong = []
    with contextlib.ExitStack() as stack:
        folder = chosen.keep or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="rlstack-soak-")
        )
        Path(folder).mkdir(parents=True, exist_ok=True)
        for topology in chosen.topologies:
            wrong += soak(topology, chosen.minutes, Path(folder) / topology)
    print("\n".join(wrong) or "flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
