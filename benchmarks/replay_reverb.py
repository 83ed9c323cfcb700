"""The Reverb replay against bare Reverb: `python -m benchmarks.replay_reverb [--quick]`.

The server is a separate process. Items are unrolls of 16 environments. Bare Reverb is used through
its C++ binding, because its Python clients are slower, in two ways:

- columns: one column per leaf, the usual way; unrolls are stacked from the same steps.
- bytes: one column of bytes that are prepared before the clock starts. Our own items have this
  format, so it is an upper bound: it leaves out the conversion from steps and back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.report import Comparison, Rate, Result, alternate, rate
from rlstack.replay import ReplayConfig
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer, binding
from rlstack.types import TimeStep, Transition

NAME = "replay_reverb"
TARGET = 0.9
NUM_ENVS = 16
_PENDING, _AHEAD = 32, 64  # items being inserted, and items prefetched, on both sides


class Output(NamedTuple):
    """The agent output of PPO."""

    action: np.ndarray
    behaviour_log_prob: np.ndarray
    value: np.ndarray


class Setting(NamedTuple):
    """One measurement."""

    what: str  # "insert" or "sample"
    steps: str  # "cartpole" or "frames"
    unroll_length: int
    batch_size: int
    reference: str  # "columns" or "bytes"
    items: int  # per measurement

    @property
    def name(self) -> str:
        """The setting's name in results."""
        batch = f"/B{self.batch_size}" if self.what == "sample" else ""
        return f"{self.what}/{self.steps}/T{self.unroll_length}{batch}/{self.reference}"


SETTINGS = (
    Setting("insert", "cartpole", 20, 32, "columns", 16_000),
    Setting("insert", "cartpole", 20, 32, "bytes", 16_000),
    Setting("insert", "cartpole", 1, 32, "columns", 16_000),
    Setting("insert", "frames", 20, 32, "columns", 640),
    Setting("sample", "cartpole", 20, 32, "columns", 20_000),
    Setting("sample", "cartpole", 20, 32, "bytes", 20_000),
    Setting("sample", "cartpole", 20, 256, "bytes", 20_000),
    Setting("sample", "frames", 1, 256, "columns", 5_120),
    Setting("sample", "frames", 20, 32, "columns", 640),
)


def make_step(kind: str) -> Transition:
    """Returns a step of all environments."""
    rng, n = np.random.default_rng(0), NUM_ENVS
    observation: np.ndarray
    if kind == "cartpole":
        observation = rng.random((n, 4), np.float32)
    else:  # as compressible as Atari's: large areas of few colours
        blocks = rng.integers(0, 256, (n, 21, 21, 4), np.uint8)
        observation = blocks.repeat(4, 1).repeat(4, 2)
    numbers = rng.random((3, n), np.float32)
    return Transition(
        TimeStep(np.ones(n, np.int32), numbers[0], np.ones(n, np.float32), observation),
        Output(np.zeros(n, np.int32), numbers[1], numbers[2]),
        (),
        np.zeros(n, np.int32),
    )


def _spec(kind: str) -> Transition:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), make_step(kind))


def _config(setting: Setting) -> ReplayConfig:
    return ReplayConfig(
        sampler="uniform",
        batch_size=setting.batch_size,
        unroll_length=setting.unroll_length,
        max_size=2048,
        period=setting.unroll_length,
    )


@contextmanager
def _server(setting: Setting) -> Iterator[str]:
    """Runs a server in a separate process; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.replay_reverb", "--serve", json.dumps(setting)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(timeout=15)
        process.stdout.close()


def _serve(setting: Setting) -> None:
    server = ReverbServer(_config(setting), NUM_ENVS, _spec(setting.steps))
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def _our_insert(setting: Setting, address: str) -> tuple[Rate, Callable[[], None]]:
    step = make_step(setting.steps)
    buffer = ReverbReplayBuffer(
        _config(setting), NUM_ENVS, address, _spec(setting.steps), max_pending=_PENDING
    )
    buffer.add(None, step)

    def work() -> None:
        for _ in range(setting.items // NUM_ENVS * setting.unroll_length):
            buffer.add(None, step)
        buffer.flush()

    return lambda: rate(setting.items, work), buffer.close


def _bare_insert(setting: Setting, address: str) -> tuple[Rate, Callable[[], None]]:
    reverb = binding.load()
    leaves = jax.tree.leaves(make_step(setting.steps))
    length = setting.unroll_length
    writer = reverb.Client(address).NewTrajectoryWriter(reverb.ConstantChunkerOptions(1, 1), 3000)

    def unrolls() -> list[np.ndarray]:
        stacked = [np.stack([leaf] * (length + 1), axis=1) for leaf in leaves]
        if setting.reference == "columns":
            return stacked
        flat = [s.reshape(NUM_ENVS, length + 1, -1).view(np.uint8) for s in stacked]
        return [np.concatenate([f.reshape(NUM_ENVS, length + 1, -1) for f in flat], -1)]

    ready = unrolls()
    squeeze = [True] * len(ready)

    def work() -> None:
        for _ in range(setting.items // NUM_ENVS):
            columns = unrolls() if setting.reference == "columns" else ready
            for env in range(NUM_ENVS):
                refs = writer.Append([column[env] for column in columns])
                writer.CreateItem("items", 1.0, [[ref] for ref in refs], squeeze)
            writer.Flush(_PENDING // 2, -1)
        writer.Flush(0, -1)

    return lambda: rate(setting.items, work), writer.Close


def _our_sample(setting: Setting, address: str) -> tuple[Rate, Callable[[], None]]:
    buffer = ReverbReplayBuffer(
        _config(setting), NUM_ENVS, address, _spec(setting.steps), prefetch=_AHEAD
    )
    buffer.sample()

    def work() -> None:
        for _ in range(setting.items // setting.batch_size):
            buffer.sample()

    return lambda: rate(setting.items, work), buffer.close


def _bare_sample(setting: Setting, address: str) -> tuple[Rate, Callable[[], None]]:
    sampler = binding.load().Client(address).NewSampler("items", -1, _AHEAD)
    first: Any = [sampler.GetNextTrajectory() for _ in range(setting.batch_size)]
    out = [np.stack([row[i] for row in first], axis=1) for i in range(4, len(first[0]))]

    def work() -> None:
        for _ in range(setting.items // setting.batch_size):
            rows = [sampler.GetNextTrajectory() for _ in range(setting.batch_size)]
            for i, column in enumerate(out):
                np.stack([row[i + 4] for row in rows], axis=1, out=column)

    return lambda: rate(setting.items, work), sampler.Close


def _fill(insert: tuple[Rate, Callable[[], None]]) -> None:
    insert[0]()
    insert[1]()


def measure(setting: Setting, repeats: int) -> tuple[Comparison, dict]:
    """Returns the comparison of one setting."""
    with _server(setting) as ours, _server(setting) as bare:
        if setting.what == "insert":
            sides = _our_insert(setting, ours), _bare_insert(setting, bare)
        else:
            few = setting._replace(items=512)
            _fill(_our_insert(few, ours))
            _fill(_bare_insert(few, bare))
            sides = _our_sample(setting, ours), _bare_sample(setting, bare)
        for measured, _ in sides:
            measured()
        comparison = alternate(sides[0][0], sides[1][0], repeats)
        for _, close in sides:
            close()
    return comparison, {}


def main() -> None:
    """Measures; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and items")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        _serve(Setting(*json.loads(arguments.serve)))
        return
    result = Result.empty(NAME)
    for setting in SETTINGS:
        if arguments.quick:
            setting = setting._replace(items=max(setting.batch_size, setting.items // 8))
        result.add(setting.name, *measure(setting, 3 if arguments.quick else 9))
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
