"""Batches assembled in the Reverb server: the same items, waits and limits as single samples."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
from rlstack.replay.reverb.fetcher import BatchFetcher
from rlstack.replay.reverb.server import BatchMaker
from rlstack.replay.reverb.table_config import LARGEST_BATCHED, is_batched
from tests.replay.replay_model import MID, check_close_wakes, config, drawn, feed, items_of
from tests.replay.reverb import backend

needs_reverb = pytest.mark.skipif(not backend.INSTALLED, reason="Reverb is not installed")
pytestmark = [pytest.mark.launchpad, needs_reverb, pytest.mark.timeout(60)]


@pytest.fixture
def connected():
    """Makes a server, and a buffer that knows only its address."""
    opened = []

    def make(cfg, num_envs, **options):
        spec = backend.spec()
        server = ReverbServer(cfg, num_envs, spec)
        opened.append(server)
        buffer = ReverbReplayBuffer(cfg, num_envs, server.address, spec, **options)
        opened.append(buffer)
        return server, buffer

    yield make
    for each in reversed(opened):
        each.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("reverb-") for name in names), names


def test_which_tables_are_batched():
    assert is_batched(config("uniform", unroll_length=7), LARGEST_BATCHED // 8)
    assert is_batched(config("prioritized"), 100)
    assert not is_batched(config("uniform", unroll_length=8), LARGEST_BATCHED // 8)
    assert not is_batched(config("fifo"), 100)


def test_batches_of_all_sizes_are_whole_items(connected):
    _, buffer = connected(config("uniform", max_size=40, batch_size=6), 2)
    feed(buffer, 2, 0, 12)
    buffer.flush()
    types = {(env, t): MID for env in range(2) for t in range(12)}
    by_key = {}
    for size in (None, 6, 4, 4, 1, 13, 9, 6, None, 30):
        sample = buffer.sample(size, timeout=5)
        items = items_of(sample.batch.trajectory, types)
        assert len(items) == len(sample.keys) == (size or 6)
        np.testing.assert_array_equal(sample.batch.weights, np.ones(size or 6, np.float32))
        for key, item in zip(sample.keys.tolist(), items, strict=True):
            assert by_key.setdefault(key, item) == item
    assert len(set(by_key.values())) == len(by_key) > 10
    assert buffer.stats()["samples"] == 6 + 6 + 4 + 4 + 1 + 13 + 9 + 6 + 6 + 30


def test_a_batch_keeps_its_values(connected):
    _, buffer = connected(config("uniform", max_size=400), 2)
    feed(buffer, 2, 0, 50)
    buffer.flush()
    first = buffer.sample(timeout=5)
    items = drawn(first)
    for _ in range(20):
        buffer.sample(timeout=5)
    assert drawn(first) == items


def test_weights_follow_the_priorities(connected):
    cfg = config(
        "prioritized", max_size=16, batch_size=16, priority_exponent=1.0, importance_exponent=1.0
    )
    _, buffer = connected(cfg, 1, prefetch=1)
    feed(buffer, 1, 0, 7)
    buffer.flush()
    first = buffer.sample(200, timeout=5)
    keys = np.unique(first.keys)
    assert len(keys) == 4
    priorities = dict(zip(keys.tolist(), [1.0, 2.0, 3.0, 6.0], strict=True))
    buffer.update_priorities(keys, np.array(list(priorities.values())))
    deadline = time.monotonic() + 20
    while True:  # until all earlier samples have been returned
        sample = buffer.sample(timeout=5)
        given = np.array([priorities[key] for key in sample.keys.tolist()])
        wanted = given.min() / given
        if np.allclose(sample.batch.weights, wanted) and 6.0 in given and given.min() < 6.0:
            break
        assert time.monotonic() < deadline
    counts = dict.fromkeys(priorities, 0)
    for _ in range(100):
        for key in buffer.sample(timeout=5).keys.tolist():
            counts[key] += 1
    expected = {key: 1600 * priority / 12 for key, priority in priorities.items()}
    assert sum((counts[k] - e) ** 2 / e for k, e in expected.items()) < 30  # 1e-6, 3 degrees


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_limits_hold_and_are_named(connected, sampler):
    cfg = config(sampler, max_size=100, min_size=6, samples_per_insert=2.0)
    _, buffer = connected(cfg, 1)
    feed(buffer, 1, 0, 8)  # five items
    buffer.flush()
    with pytest.raises(ReplayTimeoutError, match="min_size"):
        buffer.sample(timeout=0.3)
    assert not buffer.can_sample()
    feed(buffer, 1, 8, 9)
    buffer.flush()
    count = 0
    with pytest.raises(ReplayTimeoutError, match="samples_per_insert"):
        while True:
            buffer.sample(timeout=0.5)
            count += 1
    assert 1 <= count <= cfg.tolerance / cfg.batch_size
    feed(buffer, 1, 9, 11)  # two more items allow four more samples
    buffer.flush()
    buffer.sample(timeout=5)
    with pytest.raises(ReplayTimeoutError, match="samples_per_insert"):
        buffer.sample(timeout=0.3)
    assert buffer.stats()["sample_wait_seconds"] > 1.0


def test_close_ends_a_wait_for_a_batch(connected):
    _, buffer = connected(config("uniform"), 1)
    check_close_wakes(buffer, buffer.sample)


def test_batches_that_a_reader_leaves_go_to_the_next(connected):
    cfg = config("uniform", max_size=100, batch_size=2, max_times_sampled=1)
    server, buffer = connected(cfg, 1, prefetch=2)
    other = ReverbReplayBuffer(cfg, 1, server.address, backend.spec(), prefetch=2)
    with pytest.raises(ReplayTimeoutError):
        buffer.sample(timeout=0.1)
    buffer.close()  # while the server waits for its items
    writer = ReverbReplayBuffer(cfg, 1, server.address, backend.spec())
    feed(writer, 1, 0, 23)  # twenty items
    writer.flush()
    items = []
    with pytest.raises(ReplayTimeoutError):
        while True:
            items += drawn(other.sample(timeout=0.5))
    assert len(set(items)) == len(items) >= 18  # all, except a batch in transit to the other
    writer.close()
    other.close()


def test_a_server_that_is_closed_ends_calls_at_once(connected):
    server, buffer = connected(config("uniform", max_times_sampled=1), 1)
    feed(buffer, 1, 0, 4)
    buffer.flush()
    with pytest.raises(ReplayTimeoutError):
        buffer.sample(timeout=0.2)
    buffer.close()
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < 2


def test_an_error_in_the_service_ends_the_reader(connected, monkeypatch):
    def broken(self, most, seconds):
        raise OSError("no luck")

    monkeypatch.setattr(BatchMaker, "take", broken)
    _, buffer = connected(config("uniform"), 1)
    with pytest.raises(ReplayClosedError, match="no luck"):
        buffer.sample(timeout=5)


def test_without_prefetching_nothing_is_sampled_ahead(connected):
    _, buffer = connected(config("uniform"), 1, prefetch=0)
    feed(buffer, 1, 0, 10)
    buffer.flush()
    buffer.sample()
    assert not isinstance(buffer._reading._fetcher, BatchFetcher)
    assert buffer.stats()["samples"] == 4


def test_two_readers_share_a_server(connected):
    server, buffer = connected(config("uniform", max_size=100), 1)
    other = ReverbReplayBuffer(config("uniform", max_size=100), 1, server.address, buffer.spec)
    feed(buffer, 1, 0, 30)
    buffer.flush()
    for _ in range(20):
        for each in (buffer, other):
            assert len(drawn(each.sample(timeout=5))) == 4
    other.close()
