"""Processes that write checksummed steps to a shared buffer, and that can be killed at any time.

``python -m tests.replay.shared_memory.actors`` imports everything and then forks an actor for each
line it reads, so that a killed actor is replaced within milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter

import jax
import numpy as np

from rlstack.replay import ReplayClosedError
from rlstack.types import TimeStep, Transition

SIZE = 4096  # bytes of a step


def steps(envs, life, ordinals, noise) -> Transition:
    """Steps that encode env, writer's life and position in its stream, with a checksum."""
    n = len(envs)
    data = np.empty((n, SIZE), np.uint8)
    for row, ordinal in enumerate(ordinals):
        at = (ordinal * 97 + row * 13) % SIZE
        data[row, : SIZE - at] = noise[at:]
        data[row, SIZE - at :] = noise[:at]
    names = np.stack([envs, np.full(n, life), ordinals], 1).astype(np.int64)
    sums = [zlib.crc32(data[row], zlib.crc32(names[row])) for row in range(n)]
    observation = {"data": data, "name": names, "sum": np.array(sums, np.uint32)}
    zeros = np.zeros(n, np.float32)
    timestep = TimeStep(np.ones(n, np.int32), zeros, zeros, observation)
    return Transition(timestep, (), (), np.zeros(n, np.int32))


SPEC = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
    steps(np.zeros(1), 0, np.zeros(1, np.int64), np.zeros(SIZE, np.uint8)),
)


def check(sample) -> list[tuple[int, int, int]]:
    """Returns (env, life, first ordinal) of each item, after checking every byte."""
    observation = sample.batch.trajectory.timestep.observation
    names, data, sums = (observation[key] for key in ("name", "data", "sum"))
    for t, b in np.ndindex(sums.shape):
        assert zlib.crc32(data[t, b], zlib.crc32(names[t, b])) == sums[t, b], "a corrupt step"
    assert (names[..., :2] == names[0, :, :2]).all(), "a window spans a gap"
    assert (np.diff(names[..., 2], axis=0) == 1).all(), "a window skips or repeats a step"
    return [tuple(name) for name in names[0].tolist()]


def act(handle, rank: int, num_actors: int, life: int, limit: int, pause: float) -> None:
    """Writes ``limit`` steps of each environment, or until the buffer is closed."""
    writer = handle.writer(rank, num_actors)
    size = handle.num_envs // num_actors
    envs = np.arange(rank * size, (rank + 1) * size)
    noise = np.random.default_rng(life).integers(0, 256, SIZE, np.uint8)
    try:
        for t in range(limit):
            writer.add(envs, steps(envs, life, np.full(size, t), noise))
            if pause:
                time.sleep(pause)
        writer.close()
    except ReplayClosedError:
        pass


class Actors:
    """Starts and kills actors of one buffer; ends all of them on exit from the context."""

    def __init__(self, handle, num_actors: int, limit: int = 1 << 30, pause: float = 0.0):
        self._job = [pickle.dumps(handle).hex(), num_actors, limit, pause]
        self.pids: dict[int, int] = {}
        self.lives = 0

    def __enter__(self):
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.replay.shared_memory.actors"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self._ask(self._job)
        return self

    def _ask(self, question):
        self._parent.stdin.write(json.dumps(question) + "\n")
        self._parent.stdin.flush()
        return json.loads(self._parent.stdout.readline())

    def start(self, rank: int) -> None:
        self.lives += 1
        self.pids[rank] = self._ask([rank, self.lives])

    def kill(self, rank: int) -> None:
        os.kill(self.pids.pop(rank), signal.SIGKILL)

    def __exit__(self, *_):
        self._parent.stdin.close()
        self._parent.wait(20)
        self._parent.stdout.close()


def main() -> None:
    """Forks one actor per input line; kills the remaining actors at the end of the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children are reaped by the system
    job, num_actors, limit, pause = json.loads(sys.stdin.readline())
    handle = pickle.loads(bytes.fromhex(job))
    print("true", flush=True)
    pids = []
    for line in sys.stdin:
        rank, life = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                act(handle, rank, num_actors, life, limit, pause)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
        print(pid, flush=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def once(items) -> bool:
    """Whether no item occurs twice."""
    return not items or Counter(items).most_common(1)[0][1] == 1


if __name__ == "__main__":
    main()
