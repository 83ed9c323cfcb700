"""The contract that every replay backend must satisfy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from tests.replay.replay_model import (
    FIRST,
    LAST,
    MID,
    Model,
    config,
    drain,
    drawn,
    feed,
    make_transition,
)


@st.composite
def histories(draw):
    sampler = draw(st.sampled_from(["fifo", "uniform", "prioritized"]))
    num_envs, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    batch_size = draw(st.integers(1, 5))
    cfg = config(
        sampler,
        batch_size=batch_size,
        unroll_length=length,
        period=draw(st.none() | st.integers(1, length)),
        max_size=draw(st.integers(batch_size, 16)),
        max_size_per_env=draw(st.none() | st.integers(1, 16)),
        starts=draw(st.sampled_from(["any", "not_last"])),
        min_size=draw(st.integers(1, 4)),
        max_times_sampled=draw(st.none() | st.integers(1, 3)),
        samples_per_insert=draw(st.none() | st.sampled_from([0.5, 1.0, 4.0])),
        samples_per_insert_tolerance=draw(st.none() | st.integers(0, 6)),
    )
    assume(cfg.items_per_env(num_envs) * num_envs >= 2 * batch_size)
    some = st.integers(1, 2**num_envs - 1).map(
        lambda mask: [e for e in range(num_envs) if mask >> e & 1]
    )
    call = st.one_of(
        st.tuples(st.just("add"), st.none(), st.integers(1, 12)),
        st.tuples(st.just("add"), some.flatmap(st.permutations), st.integers(1, 6)),
        st.tuples(st.just("gap"), st.none() | some, st.just(1)),
        st.tuples(st.just("sample"), st.none(), st.integers(1, 5)),
        st.tuples(st.just("reload"), st.none(), st.just(1)),
    )
    return cfg, num_envs, draw(st.lists(call, max_size=40)), draw(st.integers(0, 2**16))


def step_types(model: Model, envs, rng):
    types = []
    for env in envs:
        before = model.step_types.get((env, model.ordinal[env] - 1), LAST)
        fresh = before == LAST or model.clock[env] == model.unbroken[env]
        types.append(FIRST if fresh else int(rng.choice([MID, MID, LAST])))
    return types


@settings(max_examples=200, deadline=None)
@given(history=histories())
# A step of all environments, then one of the same environments in another order.
@example(
    (
        config("fifo", batch_size=1, unroll_length=1, max_size=1),
        2,
        [("add", None, 2), ("add", [1, 0], 1)],
        0,
    )
)
def test_any_history_agrees_with_the_model(make, waits, history):
    cfg, num_envs, calls, seed = history
    rng, model = np.random.default_rng(seed), Model(cfg, num_envs, waits)
    buffer = make(cfg, num_envs)
    for name, ids, count in calls:
        envs = range(num_envs) if ids is None else ids
        for _ in range(count if name == "add" else 1):
            if name == "add":
                types = step_types(model, envs, rng)
                ordinals = [model.ordinal[e] for e in envs]
                array = None if ids is None else np.array(ids)
                if model.must_wait(envs):
                    with pytest.raises(ReplayTimeoutError, match="add"):
                        buffer.add(array, make_transition(envs, ordinals, types), timeout=0)
                    continue
                buffer.add(array, make_transition(envs, ordinals, types), timeout=0)
                # For items completed in one add, a reader that only sees each environment's
                # progress takes them in the order of the environments.
                pairs = list(zip(envs, types, strict=True))
                for env, step_type in sorted(pairs) if waits else pairs:
                    model.add(env, step_type)
                model.settle()
            elif name == "gap":
                buffer.gap(None if ids is None else np.array(ids))
                for env in envs:
                    model.gap(env)
            elif name == "reload":
                tree = buffer.save()
                buffer.close()
                buffer = make(cfg, num_envs, seed + 1)
                buffer.load(tree)
                model.refused, model.known = None, set()
            else:
                assert buffer.can_sample(count) == model.can_sample(count)
                model.refused = None if model.can_sample(count) else count
                if not model.can_sample(count):
                    with pytest.raises(ReplayTimeoutError, match="sample"):
                        buffer.sample(count, timeout=0)
                    continue
                sample = buffer.sample(count)
                model.check_sample(sample, count)
                buffer.update_priorities(sample.keys, rng.random(count))
            stats = buffer.stats()
            assert (stats["size"], stats["inserts"]) == (len(model.items), model.inserts)
            assert (stats["samples"], stats["dropped"]) == (model.samples, model.dropped)
    buffer.close()


@settings(max_examples=60, deadline=None)
@given(history=histories())
def test_no_setting_keeps_a_single_process_waiting_for_ever(make, waits, history):
    cfg, num_envs, _, seed = history
    rng, model, batches = np.random.default_rng(seed), Model(cfg, num_envs), 0
    buffer = make(cfg, num_envs)
    for _ in range(500):
        types = step_types(model, range(num_envs), rng)
        buffer.add(None, make_transition(range(num_envs), model.ordinal, types), timeout=0)
        for env in range(num_envs):
            model.add(env, types[env])
        while buffer.can_sample():
            buffer.sample()
            batches += 1
            # Where add would wait, a single thread must first sample all items.
            if not waits or (cfg.sampler != "fifo" and cfg.samples_per_insert is None):
                break
    assert batches >= 3


@pytest.mark.parametrize(
    "changes", [{"max_size_per_env": 3}, {"starts": "not_last"}, {"max_size_per_env": 1}]
)
def test_room_for_less_than_a_batch_is_refused(make, changes):
    with pytest.raises(ValueError, match="might never hold a batch"):
        make(config("fifo", **{"max_size": 5, **changes}), 1)
    with pytest.raises(ValueError, match="might never hold a batch"):
        make(config("uniform", **{"max_size": 5, "max_times_sampled": 1, **changes}), 1)


@pytest.mark.parametrize("num_envs,batch_size", [(4, 4), (4, 2), (4, 8), (3, 4)])
def test_fifo_delivers_every_item_once_in_order(make, num_envs, batch_size):
    buffer, items = make(config("fifo", batch_size=batch_size, max_size=16), num_envs), []
    for t in range(100):
        feed(buffer, num_envs, t, t + 1)
        items += [item for sample in drain(buffer) for item in drawn(sample)]
    everything = [(env, first) for first in range(0, 97, 3) for env in range(num_envs)]
    assert items == everything[: len(items)]
    assert len(everything) - len(items) < batch_size
    assert buffer.stats()["dropped"] == 0


def test_fifo_full_drops_the_oldest_and_counts(make, waits):
    buffer = make(config("fifo", max_size=8), 4)
    if waits:
        feed(buffer, 4, 0, 3 * 2 + 3)
        for _ in range(2):
            with pytest.raises(ReplayTimeoutError, match=r"max_size \(8\)"):
                buffer.add(None, make_transition(range(4), [9] * 4, [MID] * 4), timeout=0)
        assert drawn(buffer.sample()) == [(env, 0) for env in range(4)]
        feed(buffer, 4, 9, 10)
        assert drawn(buffer.sample(8)) == [(env, first) for first in (3, 6) for env in range(4)]
        assert buffer.stats()["dropped"] == 0
        return
    feed(buffer, 4, 0, 3 * 5 + 1)
    assert buffer.stats()["dropped"] == 12
    assert drawn(buffer.sample(8)) == [(env, first) for first in (9, 12) for env in range(4)]


def test_fifo_drops_stale_items_and_reports_lag(make):
    buffer = make(config("fifo", max_size=12, max_staleness=1), 4)
    feed(buffer, 4, 0, 10, versions=lambda t: max(0, (t - 1) // 3))  # items of versions 0, 1, 2
    assert drawn(buffer.sample(4)) == [(env, 3) for env in range(4)]
    stats = buffer.stats()
    assert (stats["dropped_stale"], stats["size"]) == (4, 4)
    assert (stats["lag_min"], stats["lag_mean"], stats["lag_max"]) == (1, 1, 1)
    buffer.set_params_version(4)
    assert not buffer.can_sample()
    assert buffer.stats()["dropped_stale"] == 8


def test_late_item_of_an_old_version_is_dropped_too(make):
    buffer = make(config("fifo", batch_size=1, max_staleness=0), 2)
    feed(buffer, 2, 0, 3)
    buffer.add(np.array([0]), make_transition([0], [3], [MID], [5]))
    assert not buffer.can_sample(1)
    buffer.add(np.array([1]), make_transition([1], [3], [MID], [0]))
    assert not buffer.can_sample(1)
    assert buffer.stats()["dropped_stale"] == 2


def test_a_broken_item_takes_its_turn(make, waits):
    cfg = config("fifo", batch_size=1, unroll_length=3, period=2, max_size=1)
    buffer = make(cfg, 1)
    feed(buffer, 1, 0, 5)
    assert buffer.stats()["size"] == 1
    buffer.gap(None)  # at step 5 the item starting at 2 would have replaced the one starting at 0
    if waits:  # and add would have waited
        assert buffer.stats()["size"] == 1 and buffer.stats()["dropped"] == 0
        return
    assert buffer.stats()["size"] == 0 and buffer.stats()["dropped"] == 1


def test_rate_limits(make):
    cfg = config(batch_size=2, min_size=4, samples_per_insert=0.5, samples_per_insert_tolerance=2)
    buffer, sampled = make(cfg, 1), []
    for t in range(13):
        feed(buffer, 1, t, t + 1)
        sampled.append(len(list(drain(buffer))))
    # Steps 3, 4, ... complete items; sampling starts at the 4th, each later one adds half a sample.
    assert sampled == [0] * 6 + [1, 0, 0, 0, 1, 0, 0]
    with pytest.raises(ReplayTimeoutError, match="samples_per_insert"):
        buffer.sample(timeout=0)


@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized"])
def test_load_goes_on_as_if_never_interrupted(make, sampler):
    cfg = config(sampler, max_size=32, importance_anneal_samples=50)
    one = make(cfg, 4, 7)
    feed(one, 4, 0, 20)
    first = one.sample()
    one.update_priorities(first.keys, np.arange(4) + 0.5)
    one.add(np.array([2]), make_transition([2], [20], [MID]))
    tree = one.save()
    two = make(cfg, 4, 8)
    two.load(tree)
    for buffer in (one, two):
        buffer.add(np.array([0, 1, 3]), make_transition([0, 1, 3], [20] * 3, [MID] * 3))
        feed(buffer, 4, 21, 23)
    for size in (4, 2, 6):
        a, b = one.sample(size), two.sample(size)
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.batch.weights, b.batch.weights)
        assert drawn(a) == drawn(b)
    assert one.stats() == two.stats()


def test_same_seed_same_samples(make):
    buffers = [make(config(max_size=100), 2, seed) for seed in (3, 3, 4)]
    for buffer in buffers:
        feed(buffer, 2, 0, 30)
    same, again, other = (buffer.sample(30).keys.tolist() for buffer in buffers)
    assert same == again != other


def test_batches_live_until_the_next_but_one(make):
    buffer = make(config(max_size=100), 2)
    feed(buffer, 2, 0, 30)
    for _ in range(3):
        before = buffer.sample()
        items = drawn(before)
        buffer.sample()
        assert drawn(before) == items


def test_jax_arrays_are_taken(make):
    jax = pytest.importorskip("jax")
    buffer = make(config(), 2)
    for t in range(6):
        buffer.add(None, jax.tree.map(jax.numpy.asarray, make_transition([0, 1], [t, t], [1, 1])))
    sample = buffer.sample()
    drawn(sample)
    assert all(isinstance(x, np.ndarray) for x in jax.tree_util.tree_leaves(sample.batch))


def test_wrong_input_is_refused_by_name(make):
    buffer = make(config(), 3)
    good = make_transition([0, 1, 2], [0, 0, 0], [MID] * 3)
    with pytest.raises(ValueError, match=r"reward.*(3 environments|float32\(3,\))"):
        buffer.add(None, good._replace(timestep=good.timestep._replace(reward=np.zeros(2))))
    buffer.add(None, good)
    wrong = good.timestep._replace(reward=good.timestep.reward.astype(np.float64))
    with pytest.raises(ValueError, match=r"timestep\.reward must be float32\(3,\).*float64"):
        buffer.add(None, good._replace(timestep=wrong))
    wrong = good.timestep._replace(observation={"code": np.zeros(3, np.int32)})
    with pytest.raises(ValueError, match="structure"):
        buffer.add(None, good._replace(timestep=wrong))
    wrong = good.timestep._replace(reward=np.zeros((3, 1), np.float32))
    with pytest.raises(ValueError, match="must be"):
        buffer.add(None, good._replace(timestep=wrong))
    for ids in ([0, 0, 1], [0, 1, 3], [-1, 0, 1], [0.0, 1.0, 2.0], [[0, 1, 2]], [0, 1, 2, 1]):
        with pytest.raises(ValueError, match="distinct ints"):
            buffer.add(np.array(ids), good)
    with pytest.raises(ValueError, match="must be"):
        buffer.add(np.array([0, 1]), good)
    with pytest.raises(ReplayTimeoutError, match="items must have been inserted"):
        buffer.sample(timeout=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        buffer.sample(0)
    with pytest.raises(ValueError, match=r"keys must be \[B\] ints"):
        buffer.update_priorities(np.zeros(2, np.uint64), np.zeros(3))
    with pytest.raises(ValueError, match="diverged"):
        buffer.update_priorities(np.zeros(2, np.uint64), np.array([1, np.nan]))


def test_close_ends_everything(make):
    buffer = make(config(max_size=100), 2)
    feed(buffer, 2, 0, 30)
    dataset = buffer.make_dataset()
    next(dataset)
    buffer.close()
    buffer.close()
    assert list(dataset) == [] and not buffer.can_sample()
    for call in (buffer.sample, lambda: feed(buffer, 2, 30, 31), lambda: buffer.gap(None)):
        with pytest.raises(ReplayClosedError):
            call()


@pytest.mark.parametrize("num_envs", [3, 4])
def test_load_refuses_another_table(make, num_envs):
    buffer = make(config(max_size=24), 4)
    feed(buffer, 4, 0, 30)
    with pytest.raises(ValueError, match="equal config"):
        make(config(max_size=36), num_envs).load(buffer.save())
