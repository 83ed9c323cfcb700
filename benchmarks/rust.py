"""A Rust game in one process against other ways: `python -m benchmarks.rust [--quick]`.

Each setting compares a pool of 64 MultiSnakes that one Rust program steps (``rust:``) with another
pool of the same game, which runs in alternation: a Python loop, Python worker processes, or the
same Rust program once for each game, with a socket each. Actions are random, drawn before. It needs
cargo, and builds the crate first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.report import Rate, Result, alternate, rate
from rlstack.envs import SyncEnv

NAME = "rust"
CRATE = Path(__file__).resolve().parents[1] / "clients" / "rust"
TARGET = 10.0  # the least ratio to one process and one socket for each game
_PYTHON = "rlstack.entity.games:MultiSnake"
_SOCKET = "rlstack.entity.inverted:SocketGame"


class Setting(NamedTuple):
    """One comparison with another kind of pool."""

    name: str  # for_loop, process or socket
    num_envs: int
    seconds: float  # approximate length of one measurement
    repeats: int


FULL = tuple(Setting(name, 64, 1.0, 7) for name in ("for_loop", "process", "socket"))
QUICK = tuple(setting._replace(seconds=0.2, repeats=3) for setting in FULL)


def build() -> Path:
    """Builds the example games; returns the MultiSnake.

    Raises:
      subprocess.CalledProcessError: cargo failed.
    """
    command = ["cargo", "build", "--release", "--examples", "--offline", "--locked", "--quiet"]
    subprocess.run(command, cwd=CRATE, check=True)
    return CRATE / "target" / "release" / "examples" / "multi_snake"


def pool(kind: str, num_envs: int, program: Path) -> SyncEnv:
    """Makes a pool of MultiSnakes: ``rust``, or one of the other kinds."""
    if kind == "rust":
        return SyncEnv(f"rust:{program}", num_envs, seed=1)
    if kind == "socket":
        return SyncEnv(_SOCKET, num_envs, "thread", seed=1, options={"command": str(program)})
    return SyncEnv(_PYTHON, num_envs, kind, seed=1)


def _rate(env: SyncEnv, seconds: float) -> Rate:
    """Returns the rate of steps of a pool, measured for about this many seconds."""
    rng = np.random.default_rng(0)
    drawn = [{"move": rng.integers(0, 4, (env.num_envs, 1), np.int32)} for _ in range(64)]
    env.reset()

    def work(steps: int) -> None:
        for actions in itertools.islice(itertools.cycle(drawn), steps):
            env.step(actions)

    steps = 20
    work(steps)
    calls = max(steps, round(seconds * rate(steps, functools.partial(work, steps))))
    return lambda: rate(calls * env.num_envs, functools.partial(work, calls))


def measure(setting: Setting, program: Path, result: Result) -> None:
    """Compares the two pools of one setting and adds the result."""
    closing: list[Callable[[], None]] = []
    try:
        rates = []
        for kind in ("rust", setting.name):
            env = pool(kind, setting.num_envs, program)
            closing.append(env.close)
            rates.append(_rate(env, setting.seconds))
        result.add(setting.name, alternate(rates[0], rates[1], setting.repeats), {})
    finally:
        for close in closing:
            close()


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rust")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    args = parser.parse_args(arguments)
    if shutil.which("cargo") is None:
        parser.error("cargo must be installed; it builds the Rust games")
    program, result = build(), Result.empty(NAME)
    for setting in QUICK if args.quick else FULL:
        print(f"{setting.name} ...", file=sys.stderr, flush=True)
        measure(setting, program, result)
    print(result.table(1.0))
    if result.ratios["socket"] < TARGET:
        print(f"socket: the ratio must be at least {TARGET:g}")
    print(result.line())


if __name__ == "__main__":
    main()
