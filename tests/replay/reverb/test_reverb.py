"""Behaviour specific to the Reverb backend: waits, threads, rounds, checkpoints, errors."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.replay import ReplayTimeoutError
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
from tests.replay.replay_model import (
    LAST,
    MID,
    check_close_wakes,
    config,
    drawn,
    feed,
    items_of,
    make_transition,
)
from tests.replay.reverb import backend

needs_reverb = pytest.mark.skipif(not backend.INSTALLED, reason="Reverb is not installed")
pytestmark = [pytest.mark.launchpad, needs_reverb, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def make():
    backends = backend.Backends()
    yield backends
    backends.close()


def pair(cfg, num_envs, **options):
    """A server, and a buffer that knows only its address."""
    server = ReverbServer(cfg, num_envs, backend.spec())
    spec = backend.spec()
    return server, ReverbReplayBuffer(cfg, num_envs, server.address, spec, **options)


@settings(max_examples=60, deadline=None)
@given(
    sampler=st.sampled_from(["fifo", "uniform", "prioritized"]),
    num_envs=st.integers(1, 3),
    length=st.integers(1, 4),
    period=st.integers(1, 4),
    starts=st.sampled_from(["any", "not_last"]),
    calls=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 7)), max_size=25),
    seed=st.integers(0, 2**16),
)
def test_no_window_crosses_what_it_must_not(
    make, sampler, num_envs, length, period, starts, calls, seed
):
    """Compares random adds, gaps, samples and reloads with a list of expected items."""
    cfg = config(
        sampler,
        unroll_length=length,
        period=min(period, length),
        max_size=200,
        batch_size=1,
        starts=starts,
    )
    rng, buffer = np.random.default_rng(seed), make(cfg, num_envs)
    ordinal, broken = [0] * num_envs, [0] * num_envs  # steps added; the first after the last gap
    types, items, seen = {}, [], []

    for call, mask in calls:
        envs = [e for e in range(num_envs) if mask >> e & 1] or [0]
        rng.shuffle(envs)
        if call == 0:
            buffer.gap(np.array(envs))
            for e in envs:
                broken[e] = ordinal[e]
        elif call == 1:
            tree = buffer.save()
            buffer.close()
            buffer = make(cfg, num_envs)
            buffer.load(tree)
        elif call <= 5:
            for _ in range(call):
                step_types = [int(rng.choice([MID, MID, LAST])) for _ in envs]
                ordinals = [ordinal[e] for e in envs]
                buffer.add(np.array(envs), make_transition(envs, ordinals, step_types))
                for e, kind in zip(envs, step_types, strict=True):
                    types[e, ordinal[e]] = kind
                    first = ordinal[e] - length
                    ordinal[e] += 1
                    if first < broken[e] or (first - broken[e]) % cfg.step_period:
                        continue
                    if starts == "any" or types[e, first] != LAST:
                        items.append((e, first))
        else:
            assert buffer.can_sample(1) == bool(items if sampler != "fifo" else items[len(seen) :])
            while buffer.can_sample(2) and len(seen) < 40:
                sample = buffer.sample(2)
                got = items_of(sample.batch.trajectory, types)
                seen += got
                assert set(got) <= set(items)
                buffer.update_priorities(sample.keys, rng.random(2))
    stats = buffer.stats()
    assert (stats["inserts"], stats["samples"]) == (len(items), len(seen))
    if sampler == "fifo":
        assert seen == items[: len(seen)]
    else:
        assert stats["size"] == len(items)
    buffer.close()


def test_uniform_is_uniform_where_starts_are_refused(make):
    buffer = make(config("uniform", max_size=40, starts="not_last"), 4)
    feed(
        buffer, 4, 0, 60, step_types=lambda t: [LAST if (t + e) % 5 == 0 else MID for e in range(4)]
    )
    counts = {}
    for _ in range(200):
        for key in buffer.sample(100).keys.tolist():
            counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 40 == buffer.stats()["size"]
    assert sum((n - 500) ** 2 / 500 for n in counts.values()) < 72.1  # 0.999 quantile, 39 degrees


def test_priorities_of_items_that_left_are_ignored(make):
    buffer = make(config("prioritized", max_size=4, priority_exponent=1.0), 1)
    feed(buffer, 1, 0, 7)
    old = buffer.sample(100)
    first = dict(zip(old.keys.tolist(), drawn(old), strict=True))
    feed(buffer, 1, 7, 9)  # two of the four items are removed
    keys = np.array(sorted(first, key=first.get), np.uint64)
    buffer.update_priorities(keys, np.array([3.0, 3.0, 1.0, 1.0]))
    np.testing.assert_array_equal(buffer.sample(100).batch.weights, np.ones(100))


def test_a_full_fifo_waits_and_loses_nothing():
    server, buffer = pair(config("fifo", max_size=8), 4, prefetch=0, max_pending=0)
    feed(buffer, 4, 0, 7)
    assert buffer.stats()["size"] == 8
    feed(buffer, 4, 7, 10)  # these items are in transit
    start = time.monotonic()
    with pytest.raises(ReplayTimeoutError, match="Is the learner running, and sampling fast"):
        buffer.add(None, make_transition(range(4), [10] * 4, [MID] * 4), timeout=0.3)
    assert 0.25 < time.monotonic() - start < 1
    assert buffer.stats()["add_wait_seconds"] > 0.25
    items = [item for _ in range(3) for item in drawn(buffer.sample(4))]
    assert items == [(env, first) for first in (0, 3, 6) for env in range(4)]
    buffer.close()
    server.close()


@pytest.mark.parametrize("num_envs", [4, 20, 60])
@pytest.mark.parametrize("unroll_length", [1, 3])
def test_a_writer_that_waits_for_its_learner_does_not_fill_its_log(num_envs, unroll_length, capfd):
    """Reverb prints a warning for every tenth item that is pending, from fifty on."""
    cfg = config("fifo", batch_size=4, unroll_length=unroll_length, max_size=8)
    server, buffer = pair(cfg, num_envs, prefetch=0, max_pending=64)
    writer, wanted = pickle.loads(pickle.dumps(buffer)), 20 * num_envs
    steps = 20 * unroll_length + 1
    thread = threading.Thread(target=feed, args=(writer, num_envs, 0, steps))
    thread.start()
    items = [item for _ in range(wanted // 4) for item in drawn(buffer.sample(timeout=20))]
    thread.join(timeout=20)
    assert "alarmingly" not in "".join(capfd.readouterr())
    for env in range(num_envs):
        firsts = [first for e, first in items if e == env]
        assert firsts == list(range(0, 20 * unroll_length, unroll_length))
    for each in (buffer, writer, server):
        each.close()


@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_fifo_that_is_full_before_min_size_is_sampled(prefetch):
    server, buffer = pair(config("fifo", max_size=8, min_size=20), 4, prefetch=prefetch)
    feed(buffer, 4, 0, 4)
    buffer.flush()
    with pytest.raises(ReplayTimeoutError, match="min_size"):
        buffer.sample(timeout=0.3)
    feed(buffer, 4, 4, 7)
    buffer.flush()
    assert len(drawn(buffer.sample(timeout=5))) == 4
    buffer.close()
    server.close()


@pytest.mark.parametrize("side", ["sample", "add"])
def test_close_wakes_who_waits(side):
    server, buffer = pair(config("fifo", max_size=4), 4, prefetch=4, max_pending=0)
    other = pickle.loads(pickle.dumps(buffer))
    waiting = buffer if side == "sample" else other
    wait = buffer.sample if side == "sample" else lambda: feed(other, 4, 0, 100)
    check_close_wakes(waiting, wait)
    buffer.close()
    other.close()
    server.close()


def test_prefetched_batches_are_all_items_once():
    server, buffer = pair(config("fifo", batch_size=6, max_size=32), 4)
    writer = pickle.loads(pickle.dumps(buffer))
    thread = threading.Thread(target=feed, args=(writer, 4, 0, 301))
    thread.start()
    items = [item for sample in take(buffer, 66) for item in drawn(sample)]
    thread.join(timeout=20)
    for env in range(4):  # threads may interleave environments, but keep the order of each
        assert [f for e, f in items if e == env] == list(range(0, 297, 3))
    assert not buffer.can_sample()
    with pytest.raises(ReplayTimeoutError, match=r"must hold enough items for batch_size \(6\)"):
        buffer.sample(timeout=0.1)
    for each in (buffer, writer, server):
        each.close()


def take(buffer, count):
    dataset = buffer.make_dataset()
    return (next(dataset) for _ in range(count))


def test_rounds_over_two_writers():
    cfg = config("fifo", max_size=32, min_actors=1, grace_seconds=0.3)
    server, buffer = pair(cfg, 4, num_actors=2)
    spec = backend.spec()
    writers = [
        ReverbReplayBuffer(cfg, 4, server.address, spec, env_ids=ids)
        for ids in (range(2), range(2, 4))
    ]
    for t in range(4):
        writers[1].add(None, make_transition([2, 3], [t] * 2, [MID] * 2))
    start = time.monotonic()
    assert sorted(drawn(buffer.sample(timeout=5))) == [(2, 0), (3, 0)]
    assert time.monotonic() - start > 0.25
    buffer.set_params_version(1)
    for t in range(4):
        writers[0].add(np.array([1, 0]), make_transition([1, 0], [t] * 2, [MID] * 2, [1] * 2))
    for t in range(4, 7):
        writers[1].add(None, make_transition([2, 3], [t] * 2, [MID] * 2))
    assert len(buffer.sample(timeout=5).keys) == 4
    stats = buffer.stats()
    assert (stats["late"], stats["round_actors"], stats["lag_max"]) == (2, 1, 1)
    with pytest.raises(ValueError, match="distinct ints"):
        writers[1].add(np.array([0]), make_transition([0], [7], [MID]))
    for each in (buffer, *writers, server):
        each.close()


def test_a_server_goes_on_from_its_checkpoint(tmp_path):
    cfg, spec = config("prioritized", max_size=40), backend.spec()
    server = ReverbServer(cfg, 4, spec, checkpoint_dir=tmp_path)
    buffer = ReverbReplayBuffer(cfg, 4, server.address, spec)
    feed(buffer, 4, 0, 8)
    buffer.flush()
    sample = buffer.sample()
    buffer.update_priorities(sample.keys, np.full(4, 9.0))
    buffer.update_priorities(sample.keys, np.full(4, 9.0))  # waits for the previous update
    before = buffer.stats()
    path = buffer.checkpoint()
    assert os.path.dirname(path) == str(tmp_path)
    buffer.close()
    server.close()
    server = ReverbServer(cfg, 4, spec, checkpoint_dir=tmp_path, port=server.port)
    buffer = ReverbReplayBuffer(cfg, 4, server.address, spec, prefetch=0)
    assert (buffer.stats()["size"], buffer.stats()["inserts"]) == (20, before["inserts"])
    assert drawn(buffer.sample())
    buffer.close()
    server.close()


def test_errors_name_the_way_out(make):
    cfg, spec = config("uniform"), backend.spec()
    server, buffer = pair(cfg, 2, prefetch=0)
    with pytest.raises(ValueError, match="port must be free"):
        ReverbServer(cfg, 2, spec, port=server.port)
    with pytest.raises(ValueError, match="checkpoint_dir"):
        buffer.checkpoint()
    with pytest.raises(ValueError, match="must be made with the server itself"):
        buffer.load(make(cfg, 2).save())
    with pytest.raises(ValueError, match=r"range of step 1 within 0\.\.1"):
        ReverbReplayBuffer(cfg, 2, server.address, spec, env_ids=range(1, 3))
    with pytest.raises(ValueError, match="at least 0"):
        ReverbReplayBuffer(cfg, 2, server.address, spec, prefetch=-1)
    buffer.close()
    server.close()
    cfg = config("uniform", timeout_seconds=1.5)
    with pytest.raises(ReplayTimeoutError, match="localhost:1 must answer"):
        ReverbReplayBuffer(cfg, 2, "localhost:1", spec).can_sample()


def test_tensorflow_is_not_imported():
    code = (
        "import sys\nfrom rlstack.replay import reverb\nfrom rlstack.replay.reverb import binding\n"
        "assert 'reverb.libpybind' not in sys.modules\nbinding.load()\n"
        "print(sorted({'tensorflow', 'reverb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized"])
@pytest.mark.parametrize("times", [None, 1, 3])
@pytest.mark.parametrize("ratio", [None, 0.5, 4.0])
def test_one_process_never_waits_for_itself(make, sampler, times, ratio):
    cfg = config(
        sampler,
        max_size=12,
        min_size=3,
        max_times_sampled=times,
        samples_per_insert=ratio,
        samples_per_insert_tolerance=1,
        timeout_seconds=5.0,
    )
    buffer, batches = make(cfg, 2), 0
    for t in range(30):
        feed(buffer, 2, t, t + 1)
        for _ in range(10):
            if buffer.can_sample():
                buffer.sample()
                batches += 1
    assert batches >= 2 and buffer.stats()["add_wait_seconds"] < 2


def test_a_fifo_repeats_its_items_batch_by_batch(make):
    buffer = make(config("fifo", max_times_sampled=2, max_size=16), 4)
    feed(buffer, 4, 0, 7)
    first, again, second = (drawn(buffer.sample()) for _ in range(3))
    assert first == again == [(env, 0) for env in range(4)]
    assert second == [(env, 3) for env in range(4)]


@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized"])
@pytest.mark.parametrize("options", [{}, {"min_actors": 1}], ids=["batches", "rounds"])
def test_a_buffer_with_its_server_in_the_same_process_samples_all_that_was_added(sampler, options):
    """With prefetching, whose threads may still fetch the items when the dataset is made."""
    if options and sampler != "fifo":
        pytest.skip("rounds are of a fifo")
    if sampler != "fifo":
        options = {"samples_per_insert": 1.0, "samples_per_insert_tolerance": 4.0, "period": 3}
    cfg = config(sampler, max_size=16, **options)
    server = ReverbServer(cfg, 4, backend.spec())
    buffer = ReverbReplayBuffer(cfg, 4, server, backend.spec())
    sizes = []
    with contextlib.closing(server), contextlib.closing(buffer):
        for turn in range(8):
            feed(buffer, 4, 3 * turn + (turn > 0), 3 * turn + 4)
            if turn % 2:
                buffer.flush()
                assert buffer.can_sample()
            sizes += [len(sample.keys) for sample in buffer.make_dataset()]
        assert sum(sizes) == 8 * 4
        assert options.get("min_actors") or sizes == [4] * 8  # a round takes all that has come
        assert not buffer.can_sample()
