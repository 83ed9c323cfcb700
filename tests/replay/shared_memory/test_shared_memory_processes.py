"""A shared buffer between processes: load, killed processes, and cleanup."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rlstack.replay import ReplayClosedError, SharedMemReplayBuffer
from rlstack.replay.shared_memory import block
from rlstack.replay.shared_memory.block import FOLDER, Block, start_time
from tests.replay.replay_model import config
from tests.replay.shared_memory.actors import SPEC, Actors, check, once


def blocks(pid: int) -> set[str]:
    """The blocks that a process has open."""
    folder = f"/proc/{pid}/fd"
    files = [os.path.join(folder, fd) for fd in os.listdir(folder)]
    links = {os.readlink(fd) for fd in files if os.path.lexists(fd)}
    return {link for link in links if link.startswith(f"{FOLDER}/#")}


def ends(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends within ``seconds``."""
    deadline = time.monotonic() + seconds
    while start_time(pid) >= 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return start_time(pid) < 0


@pytest.fixture
def share():
    """Makes buffers, and checks that closing them leaves nothing behind."""
    made = []

    def make(num_envs, sampler="uniform", **changes):
        cfg = config(sampler, **{"timeout_seconds": 20.0, **changes})
        made.append(SharedMemReplayBuffer(cfg, num_envs, seed=0, spec=SPEC))
        return made[-1]

    yield make
    for buffer in made:
        buffer.close()
    assert blocks(os.getpid()) == set()


def chaos(buffer, num_actors: int, seconds: float, period: float) -> tuple[float, int]:
    """Samples while a writer is killed every period (0: never); returns inserts/s and kills."""
    items, rng, kills = [], np.random.default_rng(0), 0
    with Actors(buffer.handle(), num_actors) as actors:
        for rank in range(num_actors):
            actors.start(rank)
        items += check(buffer.sample())
        start, before = time.monotonic(), int(buffer.stats()["inserts"])
        while (now := time.monotonic() - start) < seconds:
            items += check(buffer.sample())
            if period and now > (kills + 1) * period:
                kills += 1
                rank = int(rng.integers(num_actors))
                actors.kill(rank)
                actors.start(rank)
        rate = (int(buffer.stats()["inserts"]) - before) / (time.monotonic() - start)
        buffer.close()
        assert all(ends(pid) for pid in actors.pids.values())
    assert buffer.stats()["samples"] == len(items)
    if buffer._cfg.sampler == "fifo":
        assert once(items) and buffer.stats()["dropped"] == 0
    assert {env for env, _, _ in items} == set(range(buffer._num_envs))
    return rate, kills


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
@pytest.mark.parametrize("sampler", ["uniform", "fifo"])
def test_several_threads_read(share, sampler):
    """Each thread keeps its batch while others sample; a fifo gives each item to one thread."""
    buffer = share(6, sampler, batch_size=4, unroll_length=4, max_size=48)
    found, failures = [[], [], []], []

    def read(items):
        try:
            while True:
                sample = buffer.sample()
                time.sleep(0.002)
                items += check(sample)
        except ReplayClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(items,)) for items in found]
    with Actors(buffer.handle(), 3) as actors:
        for rank in range(3):
            actors.start(rank)
        for reader in readers:
            reader.start()
        time.sleep(2.0)
        buffer.close()
        for reader in readers:
            reader.join(20)
        assert all(ends(pid) for pid in actors.pids.values())
    assert not failures
    assert all(len(items) > 20 for items in found)
    if sampler == "fifo":
        assert once([item for items in found for item in items])


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "sampler,seconds",
    [
        pytest.param("uniform", 6.0, marks=[pytest.mark.slow, pytest.mark.chosen]),
        ("fifo", 3.0),
    ],
)
def test_killed_writers_corrupt_nothing(share, sampler, seconds):
    buffer = share(6, sampler, batch_size=8, unroll_length=4, max_size=48)
    _, kills = chaos(buffer, 3, seconds, period=0.25)
    assert kills > seconds


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sampler", ["uniform", "fifo"])
def test_eight_writers_one_killed_every_second_for_a_minute(share, sampler, capsys):
    def run(seconds, period):
        buffer = share(16, sampler, batch_size=16, unroll_length=4, max_size=512)
        return chaos(buffer, 8, seconds, period)

    before, _ = run(8.0, 0.0)
    rate, kills = run(60.0, 1.0)
    after, _ = run(8.0, 0.0)
    calm = min(before, after)  # the load of the machine varies
    with capsys.disabled():
        print(f"\n{sampler}: {calm:,.0f} items/s calm, {rate:,.0f} with {kills} kills")
    assert kills > 50 and rate > 0.7 * calm  # one eighth of the writers is replaced every second


@pytest.mark.timeout(60)
def test_every_fifo_item_of_every_process_comes_once(share):
    buffer = share(6, "fifo", batch_size=6, unroll_length=3, max_size=12)
    with Actors(buffer.handle(), 3, limit=3 * 50 + 1) as actors:
        for rank in range(3):
            actors.start(rank)
        items = [item for _ in range(50) for item in check(buffer.sample())]
        assert all(ends(pid) for pid in actors.pids.values())
    assert len(items) == 300 and once(items)
    assert {(env, first) for env, _, first in items} == {
        (env, first) for env in range(6) for first in range(0, 150, 3)
    }
    for env in range(6):
        firsts = [first for e, _, first in items if e == env]
        assert firsts == sorted(firsts)
    stats = buffer.stats()
    assert stats["dropped"] == 0 and stats["inserts"] == 300 and not buffer.can_sample(1)
    assert stats["add_wait_seconds"] > 0 and stats["sample_wait_seconds"] > 0


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
def test_an_environment_has_one_writer_and_a_buffer_that_is_written_is_not_loaded(share):
    buffer = share(4, max_size=64)
    tree = buffer.save()
    with Actors(buffer.handle(), 2, pause=0.001) as actors:
        actors.start(0)
        buffer.sample()
        with pytest.raises(ValueError, match="environment 0 must have one writer"):
            buffer.handle().writer(0, 2)
        with pytest.raises(ValueError, match="Load before the actors start"):
            buffer.load(tree)
        with pytest.raises(ValueError, match="rank must be below num_actors"):
            buffer.handle().writer(2, 2)
        actors.kill(0)
        deadline = time.monotonic() + 10
        while True:  # until the process has ended
            try:
                buffer.handle().writer(0, 2).close()
                break
            except ValueError:
                assert time.monotonic() < deadline
        # The buffer stays usable after a writer ends normally.
        actors.start(1)
        buffer.sample()
    assert len(blocks(os.getpid())) == 1


OWNER = """
import os, sys, time
from rlstack.replay import SharedMemReplayBuffer
from tests.replay.replay_model import config
from tests.replay.shared_memory.actors import SPEC, Actors
buffer = SharedMemReplayBuffer(config(max_size=64), 2, seed=0, spec=SPEC)
actors = Actors(buffer.handle(), 1, pause=0.001).__enter__()
actors.start(0)
buffer.sample()
print(buffer.handle().name, actors.pids[0], flush=True)
time.sleep(60)
"""


@pytest.mark.timeout(90)
def test_a_killed_owner_leaves_nothing():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        name, writer = owner.stdout.readline().split()
        assert len(blocks(owner.pid)) == 1
        Block.attach(name)  # its owner still runs
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(10)
        owner.stdout.close()
    assert ends(int(writer))  # the writer detects that the owner has ended
    with pytest.raises(FileNotFoundError):
        Block.attach(name)
    assert not [n for n in os.listdir(FOLDER) if n.startswith(f"rlstack-{owner.pid}-")]


def test_without_nameless_files_what_a_killed_owner_leaves_is_swept(monkeypatch):
    monkeypatch.setattr(block, "_open_nameless", lambda: -1)
    mine = Block.create(4096)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    left = re.sub(r"-\d+-\d+-", f"-{ended.pid}-{start_time(ended.pid)}-", mine.name, count=1)
    path = os.path.join(FOLDER, left)
    with open(path, "w"):
        block.sweep()
        assert os.path.exists(path)
        ended.wait(10)
        assert block.sweep() == [left]
    mine.memory[0] = 7
    assert Block.attach(mine.name).memory[0] == 7
    mine.unlink()
    with pytest.raises(FileNotFoundError):
        Block.attach(mine.name)


def test_a_reused_descriptor_is_not_taken_for_a_block():
    one, two = Block.create(4096), Block.create(8192)
    assert len(Block.attach(two.name).memory) == 8192
    one_fd, two_fd = (re.search(r"-fd(\d+)-", b.name)[1] for b in (one, two))
    with pytest.raises(FileNotFoundError):
        Block.attach(one.name.replace(f"-fd{one_fd}-", f"-fd{two_fd}-"))
    for made in (one, two):
        made.unlink()
        with pytest.raises(FileNotFoundError):
            Block.attach(made.name)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*fork")  # as a process that inherits a buffer does
def test_a_forked_child_neither_uses_nor_unlinks_it(share):
    buffer = share(2)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (buffer.sample, lambda: buffer.gap(None)):
                with pytest.raises(RuntimeError, match="forked child"):
                    call()
            buffer._end()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(blocks(os.getpid())) == 1
    pickle.loads(pickle.dumps(buffer)).gap(None)
    buffer.close()
    with pytest.raises(ReplayClosedError, match="was closed, or its owner ended"):
        buffer.handle().attach()
