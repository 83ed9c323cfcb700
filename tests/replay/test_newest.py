"""Batches of which a share are the newest items."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.replay import InProcessReplay, SharedMemReplayBuffer
from tests.fused import test_ring as compiled
from tests.replay.replay_model import FIRST, LAST, MID, SPEC, config, drawn, feed, make_transition
from tests.replay.served import backend as served

MAKE = {
    "in_process": lambda cfg, num_envs: InProcessReplay(cfg, num_envs, seed=3, spec=SPEC),
    "shared_memory": lambda cfg, num_envs: SharedMemReplayBuffer(cfg, num_envs, seed=3, spec=SPEC),
    "served": served.make,
}


@pytest.fixture(params=MAKE)
def make(request):
    buffers = []

    def make(num_envs=1, **changes):
        buffers.append(MAKE[request.param](config(**changes), num_envs))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_a_share_of_each_batch_is_the_newest_items(make, sampler):
    """The starts are 0 to 16 of each of two environments; a quarter of 12 are three."""
    buffer = make(2, sampler=sampler, newest_share=0.25, batch_size=12, max_size=40)
    feed(buffer, 2, 0, 20)
    others = []
    for _ in range(100):
        batch = drawn(buffer.sample())
        assert batch[:3] == [(1, 16), (0, 16), (1, 15)]
        others += batch[3:]
    counts = np.array([others.count((env, start)) for env in (0, 1) for start in range(17)])
    assert counts.sum() == 900
    assert ((counts - 900 / 34) ** 2 / (900 / 34)).sum() < 64  # 0.999 quantile, 33 degrees


def test_new_items_of_some_environments_are_the_newest(make):
    buffer = make(2, newest_share=0.5, batch_size=4, max_size=40)
    feed(buffer, 2, 0, 10)
    for step in range(10, 12):
        buffer.add(np.array([0]), make_transition([0], [step], [MID]))
    assert drawn(buffer.sample())[:2] == [(0, 8), (0, 7)]


def test_there_may_be_fewer_items_than_the_share(make):
    buffer = make(1, newest_share=1.0, batch_size=4, max_size=40)
    feed(buffer, 1, 0, 5)
    batch = drawn(buffer.sample())
    assert batch[:2] == [(0, 1), (0, 0)]
    assert set(batch[2:]) <= {(0, 0), (0, 1)}


def test_weights_are_those_of_drawn_items():
    """The newest item has the priority 4, and all others 1."""
    cfg = config("prioritized", newest_share=0.25, priority_exponent=1.0, importance_exponent=1.0)
    buffer = InProcessReplay(cfg, 1, seed=0)
    feed(buffer, 1, 0, 11)  # the starts 0 to 7
    buffer.update_priorities(np.arange(8, dtype=np.uint64), np.array([1.0] * 7 + [4.0]))
    sample = buffer.sample()
    starts = np.array([start for _, start in drawn(sample)])
    assert starts[0] == 7
    np.testing.assert_allclose(
        sample.batch.weights, np.where(starts == 7, 0.25, 1.0) / (1 if (starts < 7).any() else 0.25)
    )


def test_a_loaded_replay_draws_the_same(make):
    one, other = (make(2, newest_share=0.5, batch_size=8, max_size=40) for _ in range(2))
    feed(one, 2, 0, 15)
    other.load(one.save())
    for buffer in (one, other):
        feed(buffer, 2, 15, 16)
    for _ in range(3):
        assert drawn(one.sample()) == drawn(other.sample())


def test_without_a_share_nothing_more_is_saved():
    assert "newest" not in InProcessReplay(config(), 1, seed=0).save()["sampler"]


@pytest.mark.parametrize("name", compiled.CONFIGS)
def test_the_compiled_replay_has_the_same_newest_items(name):
    cfg = dataclasses.replace(compiled.CONFIGS[name], newest_share=0.5, max_size=30)
    other = InProcessReplay(cfg, compiled.NUM_ENVS, seed=0)
    ring, state = compiled.make(cfg)
    add, draw, gather = (jax.jit(f) for f in (ring.add, ring.draw, ring.gather))
    rng, kinds, checked = np.random.default_rng(0), np.zeros(compiled.NUM_ENVS, np.int32), 0
    for number in range(50):
        step = compiled.step_of(number, kinds)
        other.add(None, step)
        state = add(state, step)
        ends = rng.random(compiled.NUM_ENVS) < 0.3
        kinds = np.where(kinds == LAST, FIRST, np.where(ends, LAST, MID)).astype(np.int32)
        if other.can_sample():
            wanted = other.sample().batch.trajectory.timestep.reward[0, :2]
            state, cells, weights = draw(state)
            found = gather(state, cells).timestep.reward[0, :2]
            # Items of one step are equally new.
            assert sorted(np.asarray(found) // 10) == sorted(wanted // 10)
            assert jnp.isfinite(weights).all()
            checked += 1
    assert checked > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": "fifo"},
        {"sampler_factory": "json:loads"},
        {"max_times_sampled": 2},
    ],
)
def test_what_does_not_fit_is_refused(changes):
    with pytest.raises(ValueError, match=r"newest_share must be .* 0 with"):
        config(**{"newest_share": 0.5, **changes})
    with pytest.raises(ValueError, match=r"newest_share must be in \[0, 1\]"):
        config(newest_share=1.5)
