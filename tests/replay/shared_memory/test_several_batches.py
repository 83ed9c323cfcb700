"""Batches that a shared buffer draws together."""

import jax
import numpy as np
import pytest

from rlstack.replay import ReplayTimeoutError
from tests.replay.replay_model import drawn, feed


class Newest:
    """A user's sampler that returns probabilities."""

    def __call__(self, rng, items, batch_size):
        chosen = len(items) - 1 - rng.integers(0, min(5, len(items)), batch_size)
        return chosen, np.linspace(0.1, 0.2, batch_size)


def batch(several, index):
    return jax.tree.map(lambda x: x[index], several)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "fifo", "max_size": 64},
        {"sampler": "fifo", "max_size": 64, "max_times_sampled": 2},
        {},
        {"sampler": "prioritized"},
        {"sampler": "prioritized", "importance_anneal_samples": 20},
        {"sampler_factory": Newest},
        {"batch_size": 1},
    ],
    ids=lambda changes: "-".join(changes) or "uniform",
)
def test_they_are_those_that_are_drawn_one_by_one(make, changes):
    together, one_by_one = make(3, **changes), make(3, **changes)
    for buffer in (together, one_by_one):
        feed(buffer, 3, 0, 23, versions=lambda t: t)
        if changes.get("sampler") == "prioritized":
            buffer.update_priorities(buffer.sample(12).keys, np.arange(12.0))
    size = together._cfg.batch_size
    for most in (3, 1):
        several = together.sample_batches(size, most)
        assert len(several.keys) == most
        for index in range(most):
            other = one_by_one.sample()
            jax.tree.map(np.testing.assert_array_equal, batch(several, index), other)
            assert drawn(batch(several, index)) == drawn(other)
    ours, theirs = together.stats(), one_by_one.stats()
    assert ours["samples"] == theirs["samples"]
    assert ours["size"] == theirs["size"]


def test_there_are_as_many_as_the_rules_allow(make):
    fifo = make(2, "fifo", max_size=64)
    feed(fifo, 2, 0, 22)  # 14 items
    assert len(fifo.sample_batches(4, 8).keys) == 3
    with pytest.raises(ReplayTimeoutError, match="enough items"):
        fifo.sample_batches(4, 8, timeout=0.0)

    limited = make(
        1, max_size=64, min_size=4, samples_per_insert=1.0, samples_per_insert_tolerance=8
    )
    feed(limited, 1, 0, 9)  # 6 items: 8 + (6 - 4) samples
    assert len(limited.sample_batches(4, 8).keys) == 2
    with pytest.raises(ReplayTimeoutError, match="samples_per_insert"):
        limited.sample_batches(4, 8, timeout=0.0)

    limited_times = make(1, max_size=8, max_times_sampled=2)
    feed(limited_times, 1, 0, 8)  # 5 items
    assert len(limited_times.sample_batches(4, 8).keys) == 2


def test_a_round_comes_alone(make):
    buffer = make(4, "fifo", num_actors=2, max_size=64, min_actors=2)
    feed(buffer, 4, 0, 4)
    several = buffer.sample_batches(4, 8)
    assert several.keys.shape == (1, 4)
    assert sorted(drawn(batch(several, 0))) == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_what_is_overwritten_while_they_are_copied_is_drawn_again(make, monkeypatch, sampler):
    buffer = make(2, sampler, max_size=16)
    writer, step = buffer.handle().attach(), [40]
    feed(writer, 2, 0, 40)
    gather = buffer._table.ring.gather

    def slow_gather(starts, env_ids):
        batches = gather(starts, env_ids)
        feed(writer, 2, step[0], step[0] + 7)  # more than the spare rows
        step[0] += 7
        del batches
        return gather(starts, env_ids)  # as if this had been written during the first gather

    monkeypatch.setattr(buffer._table.ring, "gather", slow_gather)
    for _ in range(5):
        several = buffer.sample_batches(16, 3)
        for index in range(3):
            part = batch(several, index)
            assert all(start > step[0] - 7 - 20 for _, start in drawn(part))
            starts = [2 * start + env for env, start in drawn(part)]
            assert part.keys.tolist() == starts  # keys and windows belong together
    assert buffer.stats()["redrawn"] > 0


def test_a_batch_keeps_its_values_while_others_are_drawn(make):
    buffer = make(2)
    feed(buffer, 2, 0, 9)
    first = buffer.sample_batches(4, 2)
    kept = batch(first, 1)
    values = jax.tree.map(np.copy, kept)
    del first
    for _ in range(3):
        buffer.sample_batches(4, 2)
    jax.tree.map(np.testing.assert_array_equal, kept, values)
