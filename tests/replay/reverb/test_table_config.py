"""The parts of the Reverb replay that do not need Reverb: packing of steps, table config."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.replay.reverb import binding
from rlstack.replay.reverb.packing import LARGE, Packing
from rlstack.replay.reverb.table_config import capacity, is_whole, rate_limits
from tests.replay.replay_model import config, make_transition


@pytest.mark.parametrize("image", [(2,), (LARGE,), (84, 84, 4)])
def test_packed_items_come_out_as_they_went_in(image):
    rng = np.random.default_rng(0)
    step = make_transition(range(3), [0] * 3, [0] * 3)

    def some(x):
        return rng.integers(0, 100, (3, 5, *x.shape[1:])).astype(x.dtype)

    observation = {"code": step.timestep.observation["code"], "image": np.zeros((3, *image), "u1")}
    step = step._replace(timestep=step.timestep._replace(observation=observation))
    content = jax.tree.map(some, step)
    packing = Packing(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step))
    rows = np.zeros((3, 5, packing.step_bytes), np.uint8)
    for view, leaf in zip(packing.views(rows, rows), jax.tree.leaves(content), strict=True):
        view[...] = leaf
    trajectory = packing.tree(packing.gather(list(rows), []))
    assert jax.tree.structure(trajectory) == jax.tree.structure(content)
    for got, leaf in zip(jax.tree.leaves(trajectory), jax.tree.leaves(content), strict=True):
        assert got.dtype == leaf.dtype and got.flags.c_contiguous
        np.testing.assert_array_equal(got, leaf.swapaxes(0, 1))
    assert [packing.head(item)[1] for item in rows] == content.params_version[:, 1].tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_limits_block_both_sides(data):
    """Simulates Reverb's limiter: whenever it blocks inserts, a batch can be sampled."""
    batch_size = data.draw(st.integers(1, 8))
    cfg = config(
        data.draw(st.sampled_from(["uniform", "prioritized"])),
        batch_size=batch_size,
        max_size=data.draw(st.integers(batch_size, 40)),
        min_size=data.draw(st.integers(1, 10)),
        samples_per_insert=data.draw(st.sampled_from([0.1, 0.5, 1.0, 3.0, 8.0])),
        samples_per_insert_tolerance=data.draw(st.none() | st.integers(0, 20)),
        max_times_sampled=data.draw(st.none() | st.integers(1, 4)),
    )
    limit, rng = rate_limits(cfg, 1), np.random.default_rng(0)
    size, limit_times = capacity(cfg, 1), cfg.times_limit or 10**9
    held, inserts, samples, batches = [], 0, 0, 0
    for _ in range(300):
        measure = inserts * limit.samples_per_insert - samples
        if measure + limit.samples_per_insert <= limit.max_diff:
            inserts, held = inserts + 1, [*held, 0][-size:]
            continue
        assert inserts >= cfg.min_size
        for _ in range(batch_size):
            measure = inserts * limit.samples_per_insert - samples
            assert held and measure - 1 >= limit.min_diff, (inserts, samples)
            i = int(rng.integers(len(held)))
            held[i] += 1
            held = [times for times in held if times < limit_times]
            samples += 1
        batches += 1
    assert batches >= 2 or limit.max_diff > 1e200


def test_whole_items_unless_that_repeats_much():
    assert is_whole(config("fifo", period=1, unroll_length=20), 30_000)
    assert is_whole(config("uniform", period=20, unroll_length=20), 30_000)
    assert is_whole(config("uniform", unroll_length=1), 100)
    assert not is_whole(config("uniform", unroll_length=1), 30_000)
    assert is_whole(config("uniform", unroll_length=20), 100)
    assert not is_whole(config("uniform", unroll_length=100), 100)
    assert is_whole(config("uniform", unroll_length=80, period=40), 1000)


def test_without_reverb_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(binding, "available", lambda: False)
    monkeypatch.delitem(sys.modules, binding._NAME, raising=False)
    with pytest.raises(ImportError, match=r"Use CPython 3\.10, or the replay"):
        binding.load()
