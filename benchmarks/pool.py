"""The time that a pool adds to a step of EnvPool: `python -m benchmarks.pool`.

A recording replaces EnvPool, so that only the pool's own work is timed: checks of actions and
results, and the conversion of EnvPool's fields to a `TimeStep`.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from rlstack.envs import SyncEnv

TARGET = 30e-6  # seconds for a step of 8 CartPoles; about 6 us on an idle machine
NUM_ENVS = 8
STEPS = 500


class Recording:
    """Answers every step with the same rows."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def _send(self, fields: Any) -> None:
        pass

    def _recv(self) -> Any:
        return self._rows


def seconds(repeats: int) -> float:
    """Returns the time of a step of a pool of 8 CartPoles, the least of several measurements."""
    actions = np.zeros(NUM_ENVS, np.int32)
    with SyncEnv("CartPole-v1", NUM_ENVS) as env:
        env.reset()
        env.step(actions)
        backend: Any = env._backend
        backend._pool._send([backend._ids, backend._ids, actions])
        real, backend._pool = backend._pool, Recording(backend._pool._recv())
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(STEPS):
                env.step(actions)
            best = min(best, (time.perf_counter() - start) / STEPS)
        backend._pool = real
    return best


def main(arguments: list[str] | None = None) -> None:
    """Prints the time of a step, and fails if it is above the target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool")
    parser.add_argument("--repeats", type=int, default=20, help="the number of measurements")
    found = seconds(parser.parse_args(arguments).repeats)
    print(f"a step of {NUM_ENVS} CartPoles: {found * 1e6:.1f} us; target: {TARGET * 1e6:.0f} us")
    sys.exit(found > TARGET)


if __name__ == "__main__":
    main()
