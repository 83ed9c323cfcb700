"""Behaviour specific to the in-process backend: views, few bytes, a reused batch."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from jax.tree_util import tree_leaves

from rlstack.replay import InProcessReplay, bytes_needed
from rlstack.replay.memory import ring_shape
from rlstack.replay.prioritized import SumTree
from tests.replay.replay_model import MID, config, drawn, feed, make_transition


def addresses(sample):
    return [leaf.__array_interface__["data"][0] for leaf in tree_leaves(sample.batch.trajectory)]


@pytest.mark.parametrize("period", [None, 2])
@pytest.mark.parametrize("share", [1, 2, 5])
def test_lock_step_fifo_hands_out_views(period, share):
    cfg = config("fifo", unroll_length=4, period=period, max_size=20, max_size_per_env=share)
    buffer = InProcessReplay(cfg, 4, seed=0)
    for t in range(80):
        feed(buffer, 4, t, t + 1)
        while buffer.can_sample():
            sample = buffer.sample()
            rings = buffer._ring._rings
            for leaf, ring in zip(tree_leaves(sample.batch.trajectory), rings, strict=True):
                assert np.shares_memory(leaf, ring) and leaf.flags.c_contiguous
            assert {env for env, _ in drawn(sample)} == {0, 1, 2, 3}
    assert buffer.stats()["samples"] == 4 * (75 // cfg.step_period + 1)


def test_fifo_out_of_step_gathers():
    buffer = InProcessReplay(config("fifo"), 4, seed=0)
    for t in range(4):
        for env in (2, 0, 3, 1):
            buffer.add(np.array([env]), make_transition([env], [t], [MID]))
    sample = buffer.sample()
    assert drawn(sample) == [(2, 0), (0, 0), (3, 0), (1, 0)]
    leaf = sample.batch.trajectory.timestep.reward
    assert not np.shares_memory(leaf, buffer._ring._rings[1])


def test_lock_step_returns_after_environments_went_apart():
    buffer = InProcessReplay(config("fifo"), 2, seed=0)
    buffer.add(np.array([1]), make_transition([1], [0], [MID]))
    buffer.add(np.array([0]), make_transition([0], [0], [MID]))
    feed(buffer, 2, 1, 4)
    assert buffer._counter.together
    assert drawn(buffer.sample(2)) == [(0, 0), (1, 0)]


def test_gathered_batches_reuse_memory():
    buffer = InProcessReplay(config(max_size=100), 2, seed=0)
    feed(buffer, 2, 0, 30)
    held = [buffer.sample() for _ in range(20)]
    seen = [addresses(sample) for sample in held]
    assert len(set(map(str, seen))) == 8
    assert all(a != b for a, b in itertools.pairwise(seen))


def test_memory_that_nobody_looks_at_is_taken_again_at_once():
    buffer = InProcessReplay(config(max_size=100), 2, seed=0)
    feed(buffer, 2, 0, 30)
    first = addresses(buffer.sample())
    assert [addresses(buffer.sample()) for _ in range(3)] == [first] * 3
    view = buffer.sample().batch.trajectory.timestep.reward[1:]  # a view of a part also holds it
    kept = view.copy()
    assert addresses(buffer.sample()) != first
    np.testing.assert_array_equal(view, kept)


@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized"])
def test_bytes_needed_is_what_is_taken(sampler):
    cfg = config(sampler, max_size=400)
    buffer = InProcessReplay(cfg, 4, seed=0)
    feed(buffer, 4, 0, 10)
    for _ in range(2):
        buffer._ring.gather(np.zeros(4, np.int64), np.arange(4))
    arrays = [*buffer._ring._rings, *tree_leaves(list(buffer._ring._buffers.values()))]
    taken = sum(array.nbytes for array in arrays)
    taken += buffer._table.sampler.key_at.nbytes + buffer._table.sampler._times.nbytes
    if sampler == "fifo":
        taken += buffer._table.sampler._queue.nbytes
    if sampler == "prioritized":
        taken += sum(level.nbytes for level in buffer._table.sampler._tree._levels)
    example = make_transition([0], [0], [MID])
    assert abs(bytes_needed(cfg, example, 4) / taken - 1) < 0.02


def test_steps_are_stored_once():
    cfg = config(unroll_length=10, max_size=1000)
    assert ring_shape(cfg, 4).rows == 250 + 10


def test_adding_and_sampling_from_two_threads():
    buffer = InProcessReplay(config(max_size=64), 4, seed=0)
    feed(buffer, 4, 0, 10)
    failures = []

    def read():
        try:
            for _ in range(300):
                drawn(buffer.sample())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    t = 10
    while thread.is_alive():
        feed(buffer, 4, t, t + 1)
        t += 1
    thread.join(timeout=30)
    assert not failures and t > 10


@pytest.mark.parametrize("size", [1, 16, 17, 1000])
def test_sum_tree_against_cumulative_sums(size):
    rng, tree = np.random.default_rng(size), SumTree(size)
    for _ in range(5):
        changed = rng.integers(0, size, 50)
        tree.leaves[changed] = rng.random(50) * rng.integers(0, 2, 50)
        tree.leaves[changed[0]] = 1.0
        tree.update(changed)
        sums = np.cumsum(tree.leaves[:size])
        assert tree.total == pytest.approx(sums[-1])
        points = rng.random(1000) * tree.total
        found = tree.find(points)
        assert (tree.leaves[found] > 0).all()
        assert (found != np.searchsorted(sums, points, side="right")).sum() <= 1
        assert tree.leaves[tree.find(np.array([0.0, tree.total]))].min() > 0
