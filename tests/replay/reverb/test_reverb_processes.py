"""Reverb with server and writers in separate processes, and behaviour when one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
from tests.replay.replay_model import MID, config, drawn, feed, make_transition
from tests.replay.reverb import backend

needs_reverb = pytest.mark.skipif(not backend.INSTALLED, reason="Reverb is not installed")
pytestmark = [pytest.mark.launchpad, needs_reverb, pytest.mark.timeout(60)]


def serve(fields, num_envs, *rest):
    """Runs in a server process, until standard input ends."""
    port, folder = rest
    server = ReverbServer(
        config(**fields), num_envs, backend.spec(), port=port, checkpoint_dir=folder
    )
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()


def write(fields, num_envs, address, start, stop, steps):
    """Runs in a writer process: adds steps of its environments."""
    buffer = ReverbReplayBuffer(
        config(**fields),
        num_envs,
        address,
        backend.spec(),
        env_ids=range(start, stop),
    )
    count = stop - start
    for t in range(steps):
        buffer.add(None, make_transition(range(start, stop), [t] * count, [MID] * count))
    buffer.flush()
    print("done", flush=True)
    sys.stdin.read()
    buffer.close()


class Processes:
    def __init__(self):
        self.all = []

    def start(self, function, *arguments):
        code = (
            "import sys, json\nfrom tests.replay.reverb import test_reverb_processes as module\n"
            f"module.{function}(*json.loads(sys.argv[1]))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        self.all.append(process)
        return process

    def serve(self, fields, num_envs, port=None, folder=None):
        process = self.start("serve", fields, num_envs, port, folder)
        return process, f"localhost:{process.stdout.readline().strip()}"


@pytest.fixture
def processes():
    started = Processes()
    yield started
    for process in reversed(started.all):  # a server waits 5 s for connected clients
        process.stdin.close()
        try:
            process.wait(timeout=10)
        finally:
            process.kill()
            process.stdout.close()
            process.wait(timeout=5)


@pytest.mark.slow
@pytest.mark.chosen
def test_two_writers_one_reader(processes):
    fields = {"sampler": "fifo", "max_size": 16}
    _, address = processes.serve(fields, 5)
    for start, stop in ((0, 2), (2, 5)):
        processes.start("write", fields, 5, address, start, stop, 61)
    buffer = ReverbReplayBuffer(config(**fields), 5, address, backend.spec())
    items = []
    while len(items) < 100:
        items += drawn(buffer.sample(timeout=30))
    for env in range(5):
        assert [f for e, f in items if e == env] == list(range(0, 60, 3))
    stats = buffer.stats()
    assert (stats["inserts"], stats["samples"], stats["dropped"]) == (100, 100, 0)
    buffer.close()


def test_a_writer_that_is_killed_leaves_whole_items(processes):
    fields = {"sampler": "uniform", "max_size": 500, "unroll_length": 4, "period": 4}
    _, address = processes.serve(fields, 2)
    writer = processes.start("write", fields, 2, address, 0, 2, 1_000_000)
    buffer = ReverbReplayBuffer(config(**fields), 2, address, backend.spec())
    for _ in range(20):
        drawn(buffer.sample(timeout=30))
    writer.send_signal(signal.SIGKILL)
    writer.wait(timeout=10)
    before = buffer.stats()["inserts"]
    for _ in range(20):
        drawn(buffer.sample(timeout=10))
    feed(buffer, 2, 0, 9)  # a restarted actor starts new streams
    buffer.flush(timeout=10)
    assert buffer.stats()["inserts"] == before + 4
    buffer.close()


@pytest.mark.slow
@pytest.mark.chosen
def test_a_server_that_is_killed_is_named_and_found_again(processes, tmp_path):
    fields = {"sampler": "prioritized", "max_size": 40, "timeout_seconds": 1.0, "batch_size": 2}
    server, address = processes.serve(fields, 2, None, str(tmp_path))
    buffer = ReverbReplayBuffer(
        config(**fields), 2, address, backend.spec(), prefetch=2, max_pending=4
    )
    feed(buffer, 2, 0, 20)
    buffer.flush()
    sample = buffer.sample()
    buffer.checkpoint()
    server.send_signal(signal.SIGKILL)
    server.wait(timeout=10)
    start = time.monotonic()
    with pytest.raises(ReplayTimeoutError, match=f"{address} must answer"):
        for _ in range(50):  # a few samples are already prefetched
            buffer.sample(timeout=0.5)
    with pytest.raises(ReplayTimeoutError, match=f"{address} must answer"):
        for _ in range(3):
            buffer.update_priorities(sample.keys, np.ones(2))
    with pytest.raises((ReplayTimeoutError, ReplayClosedError), match=address):
        for t in range(20, 60):
            buffer.add(None, make_transition([0, 1], [t, t], [MID, MID]), timeout=0.5)
    with pytest.raises(ReplayTimeoutError, match=f"{address} must answer"):
        buffer.stats()
    assert time.monotonic() - start < 25
    processes.serve(fields, 2, int(address.split(":")[1]), str(tmp_path))
    deadline = time.monotonic() + 20
    while True:
        try:
            drawn(buffer.sample(timeout=2))
            break
        except ReplayTimeoutError:
            assert time.monotonic() < deadline
    assert buffer.stats()["inserts"] >= 34
    buffer.close()


def test_closing_without_a_server_takes_no_time(processes):
    fields = {"sampler": "fifo", "max_size": 8, "timeout_seconds": 1.0}
    server, address = processes.serve(fields, 2)
    buffer = ReverbReplayBuffer(config(**fields), 2, address, backend.spec())
    feed(buffer, 2, 0, 8)
    assert not buffer.can_sample(100)
    server.send_signal(signal.SIGKILL)
    server.wait(timeout=10)
    start = time.monotonic()
    buffer.close()
    assert time.monotonic() - start < 6
