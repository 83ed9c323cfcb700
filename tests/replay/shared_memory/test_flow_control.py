"""How writers and the reader of a shared buffer wait for each other, inside one process."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.replay import (
    ReplayClosedError,
    ReplayTimeoutError,
    SharedMemReplayBuffer,
)
from tests.replay.replay_model import (
    MID,
    SPEC,
    drain,
    drawn,
    feed,
    make_transition,
)
from tests.replay.test_replay_contract import histories


@pytest.mark.timeout(30)
def test_a_full_fifo_waits_until_there_is_room_until_the_time_is_over_or_until_close(make):
    buffer = make(2, "fifo", batch_size=2, max_size=4, unroll_length=2)
    writer = buffer.handle().attach()
    feed(writer, 2, 0, 6)
    start = time.monotonic()
    with pytest.raises(ReplayTimeoutError, match=r"max_size \(4\)"):
        writer.add(None, make_transition([0, 1], [6, 6], [MID] * 2), timeout=0.1)
    assert 0.1 <= time.monotonic() - start < 2
    thread = threading.Thread(target=feed, args=(writer, 2, 6, 7))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive() and drawn(buffer.sample()) == [(0, 0), (1, 0)]
    thread.join(5)
    assert not thread.is_alive()
    feed(writer, 2, 7, 8)
    hungry, ended = make(2), []

    def blocked():
        with pytest.raises(ReplayClosedError):
            feed(writer, 2, 8, 9)
        ended.append("add")

    def starved():
        with pytest.raises(ReplayClosedError):
            while True:
                hungry.sample()
        ended.append("sample")

    threads = [threading.Thread(target=target) for target in (blocked, starved)]
    [thread.start() for thread in threads]
    time.sleep(0.1)
    buffer.close()
    hungry.close()
    [thread.join(5) for thread in threads]
    assert sorted(ended) == ["add", "sample"]
    assert buffer.stats()["add_wait_seconds"] > 0.15
    assert hungry.stats()["sample_wait_seconds"] > 0.05


@pytest.mark.timeout(30)
def test_sample_waits_for_items_and_the_dataset_ends_with_close(make):
    buffer = make(2, "fifo", batch_size=2)
    got = []

    def read():
        got.extend(item for sample in buffer.make_dataset() for item in drawn(sample))

    thread = threading.Thread(target=read)
    thread.start()
    feed(buffer.handle().attach(), 2, 0, 13)
    deadline = time.monotonic() + 10
    while len(got) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    buffer.close()
    thread.join(5)
    assert got == [(env, first) for first in (0, 3, 6, 9) for env in (0, 1)]


@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None)
@given(history=histories(), asks=st.lists(st.integers(1, 5), max_size=6))
def test_no_setting_dead_locks_a_writer_and_a_reader(history, asks):
    cfg, num_envs, _, _ = history
    cfg = dataclasses.replace(cfg, timeout_seconds=20.0)
    buffer = SharedMemReplayBuffer(cfg, num_envs, seed=0, spec=SPEC)
    failures: list[BaseException] = []

    def write():
        try:
            writer, t = buffer.handle().writer(0, 1), 0
            while True:
                feed(writer, num_envs, t, t + 1, step_types=lambda t: [t % 4 and MID] * num_envs)
                t += 1
        except ReplayClosedError:
            pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for size in [None, None, *asks, None]:
            assert size is None or size <= 5
            # A request may exceed the number of items that the buffer ever holds.
            size = None if size and size > cfg.batch_size else size
            assert len(buffer.sample(size).keys) == (size or cfg.batch_size)
    finally:
        buffer.close()
        thread.join(25)
    assert not thread.is_alive() and not failures


@pytest.mark.timeout(30)
def test_writers_are_held_back_to_the_ratio(make):
    changes = {"samples_per_insert": 0.5, "min_size": 4, "batch_size": 4}
    buffer = make(2, "uniform", max_size=100, samples_per_insert_tolerance=4.0, **changes)
    writer, t = buffer.handle().attach(), 0
    for _ in range(3):
        with pytest.raises(ReplayTimeoutError, match="samples_per_insert"):
            while True:
                writer.add(None, make_transition([0, 1], [t, t], [MID] * 2), timeout=0.01)
                t += 1
        inserts, samples = buffer._shared.counters.steps.sum() - 6, buffer.stats()["samples"]
        assert 4.0 < 0.5 * (inserts - 4) - samples <= 4.0 + 0.5 * 2
        assert sum(1 for _ in drain(buffer)) >= 1


@pytest.mark.timeout(30)
def test_when_all_wait_the_oldest_go_but_not_while_one_may_still_write(make):
    buffer = make(2, "fifo", batch_size=2, max_size=8, max_size_per_env=2, min_size=20)
    writers, stop = [buffer.handle().writer(rank, 2) for rank in range(2)], threading.Event()
    counts = [0, 0]

    def write(rank):
        try:
            while not stop.is_set():
                step = [counts[rank]]
                writers[rank].add(np.array([rank]), make_transition([rank], step, [MID]))
                counts[rank] += 1
        except ReplayClosedError:
            pass

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    threads[0].start()
    with pytest.raises(ReplayTimeoutError, match="min_size"):
        buffer.sample(timeout=0.3)
    assert buffer.stats()["dropped"] == 0 and counts[0] == 9
    threads[1].start()
    items = drawn(buffer.sample(timeout=10))
    assert buffer.stats()["inserts"] >= 20 and len(items) == 2
    assert 16 <= buffer.stats()["dropped"] <= buffer.stats()["inserts"] - 2
    stop.set()
    buffer.close()
    [thread.join(5) for thread in threads]


@pytest.mark.timeout(30)
def test_a_round_goes_when_its_actors_have_reported_and_the_grace_is_over(make):
    buffer = make(6, "fifo", num_actors=3, max_size=48, min_actors=2, grace_seconds=0.2)
    actors = [buffer.handle().writer(rank, 3) for rank in range(3)]

    def report(rank, first, last, version):
        ids = np.array([2 * rank, 2 * rank + 1])
        for t in range(first, last):
            actors[rank].add(ids, make_transition(ids, [t, t], [MID] * 2, [version] * 2))

    report(0, 0, 4, 0)
    with pytest.raises(ReplayTimeoutError, match=r"min_actors \(2\)"):
        buffer.sample(timeout=0.05)
    report(2, 0, 4, 0)
    start = time.monotonic()
    assert sorted(drawn(buffer.sample())) == [(env, 0) for env in (0, 1, 4, 5)]
    assert 0.1 < time.monotonic() - start < 2
    buffer.set_params_version(1)
    report(1, 0, 4, 0)
    report(0, 4, 7, 1)
    report(1, 4, 7, 1)
    report(2, 4, 7, 1)
    start = time.monotonic()
    assert len(drawn(buffer.sample())) == 8
    assert time.monotonic() - start < 0.15
    assert (buffer.stats()["round_actors"], buffer.stats()["late"]) == (3, 2)


@pytest.mark.timeout(30)
def test_actors_that_wait_for_space_make_a_round_instead_of_losing_items(make):
    """As in an asynchronous pool of which one environment is much slower than another."""
    buffer = make(4, "fifo", num_actors=2, max_size=8, min_actors=2, grace_seconds=0.0)
    actors = [buffer.handle().writer(rank, 2) for rank in range(2)]
    for t in range(4):  # actor 0 reports, and waits for newer params
        actors[0].add(np.array([0, 1]), make_transition([0, 1], [t] * 2, [MID] * 2, [0] * 2))
    full, end = threading.Event(), threading.Event()

    def add():
        t = 0
        while not end.is_set():
            try:
                actors[1].add(np.array([2]), make_transition([2], [t], [MID], [0]), timeout=0.2)
                t += 1
            except ReplayTimeoutError:
                full.set()

    thread = threading.Thread(target=add)
    thread.start()
    assert full.wait(10)
    sample = buffer.sample(timeout=10)
    end.set()
    thread.join(5)
    stats = buffer.stats()
    assert (stats["dropped"], stats["dropped_stale"]) == (0, 0)
    assert len(sample.keys) >= 4 and (0, 0) in drawn(sample) and (2, 0) in drawn(sample)
    buffer.close()
