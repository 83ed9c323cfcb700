"""How long a start takes, against a hand-written script: `python -m benchmarks.starts [--quick]`.

The script is `benchmarks/script_ppo.py`, one file with JAX, optax and gymnax. Its time is that of
the whole process: imports, compilation, training and an evaluation. Absolute times of starts depend
on the machine, and on what else it does; ratios hardly do.

- train/...: the script's time divided by that of `rlstack train gymnax-cartpole-ppo` up to its
  `result.json`, which does the same, writes logs and checkpoints, and evaluates once more.
- program/...: the script's time divided by that from `rlstack.programs.run.train.run` to the first
  logged update of a distributed program of six processes (`benchmarks.topologies`).

Each is measured without stored compiled functions, and with those of an earlier start. The script
stores none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from benchmarks.report import Result, alternate
from benchmarks.topologies import start_seconds
from rlstack.programs.program.launch import compiled
from rlstack.rpc import transports

NAME = "starts"
_SCRIPT = Path(__file__).with_name("script_ppo.py")
_SOLVED = 475.0  # mean return


class Setting(NamedTuple):
    """One comparison."""

    name: str
    seconds: Callable[[Path], float]  # of our start, given a folder for compiled functions
    target: float
    repeats: int


def _seconds(command: list[str], result: Path, field: str, **variables: str) -> float:
    """Returns the seconds that a command takes to write its result.

    Raises:
      RuntimeError: the command failed, or its agent has not learned.
    """
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=_SCRIPT.parent.parent,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - started
    found = json.loads(result.read_text())[field] if done.returncode == 0 else 0.0
    if found < _SOLVED:
        raise RuntimeError(f"{' '.join(command)}: return {found:g}; {done.stderr}")
    return seconds


@functools.cache
def _script_seed() -> int:
    """Returns a seed that learns on this machine: the rounding of the CPU decides about some."""
    for seed in range(1, 5):
        with contextlib.suppress(RuntimeError):
            _script(seed)
            return seed
    raise RuntimeError(f"{_SCRIPT} learns with none of the seeds 1 to 4")


def _script(seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        return _seconds([str(_SCRIPT), str(result), str(seed)], result, "return")


def _train(stored: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = ["-m", "rlstack", "train", "gymnax-cartpole-ppo", "--run-dir", str(run_dir)]
        result = run_dir / "result.json"
        return _seconds(command, result, "eval_return_mean", **{compiled.OWN: stored})


def _train_again(folder: Path) -> float:
    if not folder.exists():
        _train(str(folder))  # stores
    return _train(str(folder))


def _program() -> float:
    with transports.chosen("zmq"):
        return start_seconds()


def _program_again(folder: Path) -> float:
    stored = folder.exists()
    with mock.patch.dict(os.environ, {compiled.OWN: str(folder)}):  # also undoes what `keep` sets
        compiled.keep()
        if not stored:
            _program()  # stores
        return _program()


FULL = (
    Setting("train/nothing_stored", lambda _: _train(""), 0.8, 7),
    Setting("train/stored", _train_again, 1.2, 5),
    Setting("program/nothing_stored", lambda _: _program(), 1.2, 7),
    Setting("program/stored", _program_again, 2.4, 5),
)
QUICK = tuple(setting._replace(repeats=1) for setting in FULL)


def _measure(setting: Setting, result: Result) -> None:
    seed = _script_seed()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "compiled"
        comparison = alternate(
            lambda: 1 / setting.seconds(folder), lambda: 1 / _script(seed), setting.repeats
        )
    result.add(setting.name, comparison, {})
    for side, rates in ("ours", comparison.ours), ("reference", comparison.reference):
        seconds = statistics.median(1 / rate for rate in rates)
        result.medians[setting.name][f"{side}_seconds"] = round(seconds, 2)


def main() -> None:
    """Measures every setting; prints a table and one JSON line."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}")
    parser.add_argument("--quick", action="store_true", help="each measurement once")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in the name")
    chosen = parser.parse_args()
    settings = [s for s in (QUICK if chosen.quick else FULL) if chosen.only in s.name]
    result = Result.empty(NAME)
    for setting in settings:
        print(f"{setting.name} (load {os.getloadavg()[0]:.1f}) ...", file=sys.stderr, flush=True)
        _measure(setting, result)
    print(result.table(0.0))
    for setting in settings:
        print(result.verdict(setting.name, setting.target))
    print(result.line())


if __name__ == "__main__":
    main()
