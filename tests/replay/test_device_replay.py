"""Replay on a device: the contract of replays, for environments that step together."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rlstack.learning import device_replay
from rlstack.learning.device_replay import DeviceReplay, device_bytes
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.replay.frame_stack import FrameStacks, StackedReplay
from rlstack.types import StartSpec
from tests.replay import test_frame_stack as frames
from tests.replay.replay_model import (
    FIRST,
    LAST,
    MID,
    SPEC,
    Model,
    config,
    drawn,
    feed,
    make_transition,
)

NUM_ENVS = 3
SLOW = [pytest.mark.slow, pytest.mark.chosen]  # compiles much
CONFIGS = {
    "transitions": config(
        unroll_length=2, max_size=20, starts="not_last", min_size=5, samples_per_insert=1.5
    ),
    "priorities": config(
        "prioritized", max_size=18, min_size=4, samples_per_insert=2.0, newest_share=0.25
    ),
    "sequences": config(
        "prioritized",
        unroll_length=5,
        period=3,
        max_size=12,
        samples_per_insert=4.0,
        samples_per_insert_tolerance=6,
        importance_anneal_samples=50,
    ),
}


def make(cfg, num_envs=NUM_ENVS, seed=0):
    return DeviceReplay(cfg, num_envs, rng_key=jax.random.PRNGKey(seed), spec=SPEC)


def step_types(model, rng):
    types = []
    for env in range(NUM_ENVS):
        before = model.step_types.get((env, model.ordinal[env] - 1), LAST)
        fresh = before == LAST or model.clock[env] == model.unbroken[env]
        types.append(FIRST if fresh else int(rng.choice([MID, MID, LAST])))
    return types


@pytest.mark.parametrize(
    "name",
    ["sequences", *(pytest.param(name, marks=SLOW) for name in ("transitions", "priorities"))],
)
def test_a_history_agrees_with_the_model(name):
    cfg, rng = CONFIGS[name], np.random.default_rng(3)
    size, model, buffer = cfg.batch_size, Model(cfg, NUM_ENVS), make(cfg)
    seen = dict.fromkeys(("add", "gap", "sample"), 0)
    for turn in range(160):
        if turn == 90:  # a checkpoint of rings that are full, read by another object
            tree = buffer.save()
            buffer.close()
            buffer = make(cfg, seed=1)
            buffer.load(tree)
        call = str(rng.choice(["add", "gap", "sample"], p=[0.75, 0.05, 0.2]))
        if call == "add":
            types = step_types(model, rng)
            buffer.add(None, make_transition(range(NUM_ENVS), model.ordinal, types))
            for env, step_type in enumerate(types):
                model.add(env, step_type)
        elif call == "gap":
            buffer.gap(None)
            for env in range(NUM_ENVS):
                model.gap(env)
        elif model.can_sample(size):
            sample = buffer.sample()
            model.check_sample(sample, size)
            buffer.update_priorities(sample.keys, rng.random(size))
        else:
            call = ""
            with pytest.raises(ReplayTimeoutError, match=r"sample: "):
                buffer.sample(timeout=0)
        seen[call] = seen.get(call, 0) + 1
        assert buffer.can_sample() == model.can_sample(size)
        stats = buffer.stats()
        assert (stats["size"], stats["inserts"]) == (len(model.items), model.inserts)
        assert stats["samples"] == model.samples
    assert min(seen.values()) >= 2
    # What the host counts is what the device counts.
    buffer._write_waiting()
    state, counters = buffer.state, buffer.counters
    assert (int(state.held), int(state.inserts)) == (counters.held, counters.inserts)
    assert (int(state.credit), int(state.drawn)) == (counters.credit, counters.samples)
    np.testing.assert_array_equal(state.valid, counters.valid)


@pytest.mark.parametrize("name", ["transitions", pytest.param("sequences", marks=SLOW)])
@pytest.mark.parametrize("count", [9, 40])  # before and after the rings are full
def test_load_goes_on_as_if_never_interrupted(name, count, monkeypatch):
    monkeypatch.setattr(device_replay, "_BLOCK_BYTES", 64)  # a few rows at a time
    cfg = CONFIGS[name]
    one, two = make(cfg, seed=7), make(cfg, seed=8)
    feed(one, NUM_ENVS, 0, count)
    if one.can_sample():
        first = one.sample()
        one.update_priorities(first.keys, np.arange(4) + 0.5)
    tree = one.save()
    two.load(tree)
    for buffer in (one, two):
        feed(buffer, NUM_ENVS, count, count + 9)
    for _ in range(2):
        a, b = one.sample(), two.sample()
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.batch.weights, b.batch.weights)
        assert drawn(a) == drawn(b)
    assert one.stats() == two.stats()
    for x, y in zip(jax.tree.leaves(one.save()), jax.tree.leaves(two.save()), strict=True):
        np.testing.assert_array_equal(x, y)
    rows = {"transitions": 7 + 2, "sequences": 4 * 3 + 5}[name]
    assert {len(x) for x in tree["steps"]} == {min(count, rows)}  # the filled ones


def test_priorities_are_set_by_key_and_those_of_items_that_left_are_ignored():
    buffer = make(CONFIGS["priorities"])
    feed(buffer, NUM_ENVS, 0, 9)  # six items of each environment: all that it holds
    sample = buffer.sample()
    feed(buffer, NUM_ENVS, 9, 12)  # three of them are replaced
    key = int(buffer.counters.keys(np.array([buffer.counters.newest % 6 * NUM_ENVS + 1]))[0])
    keys = np.array([key, 0, key], np.uint64)  # of equal keys the last one counts
    before = np.asarray(buffer.state.masses[0])
    buffer.update_priorities(keys, np.array([7.0, 9.0, 2.0]))
    after = np.asarray(buffer.state.masses[0])
    (changed,) = np.flatnonzero(before != after)
    assert changed == key % (6 * NUM_ENVS)
    assert after[changed] == pytest.approx(2.0**0.6)
    assert len(sample.keys) == 4


def test_outputs_are_written_back_by_key():
    buffer = make(CONFIGS["transitions"])
    feed(buffer, NUM_ENVS, 0, 9)
    sample = buffer.sample()
    output = sample.batch.trajectory.agent_output
    new = output._replace(action=None, value=output.value + 5.0)
    buffer.write_back(sample.keys, new)
    written = {(int(k), t) for k in sample.keys for t in range(3)}
    written = {(k % NUM_ENVS, k // NUM_ENVS + t) for k, t in written}
    for _ in range(3):
        feed(buffer, NUM_ENVS, 9, 10) if not buffer.can_sample() else None
        again = buffer.sample().batch.trajectory
        code = again.timestep.observation["code"]
        for value, one in zip(again.agent_output.value.ravel(), code.ravel(), strict=True):
            assert value == 5.0 * ((one // 100_000, one % 100_000) in written)
    with pytest.raises(ValueError, match=r"leaf 1 of the agent's output must be float32\(3, 4\)"):
        buffer.write_back(sample.keys, new._replace(value=output.value[:2]))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("padding", ["repeat", "zeros", "continue"])
def test_stacks_come_back_exactly(padding):
    """Frames that the host joins, and stacks that the compiled update reads."""
    cfg = frames.config(sampler="prioritized", period=2, samples_per_insert=8.0)
    streams = [frames.Stream(e, padding, np.random.default_rng(e)) for e in range(NUM_ENVS)]
    first = frames.transition(streams)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), first)
    stacks = FrameStacks(cfg, NUM_ENVS, spec._replace(agent_state=StartSpec((), np.int32)))
    key = jax.random.PRNGKey(0)
    held = DeviceReplay(stacks.cfg, NUM_ENVS, rng_key=key, spec=stacks.spec, stacks=stacks)
    buffer, seen = StackedReplay(stacks, held), {}
    draw = jax.jit(held.table(None).draw)
    items = jax.jit(held.table(None).items)
    step, checked = first, 0
    for t in range(80):
        for row, stream in enumerate(streams):
            image = step.timestep.observation["image"][row].copy()
            seen[stream.env * 1000 + stream.step] = image
        if t == 50:
            buffer.gap(None)
        buffer.add(None, step)
        step = frames.transition(streams)
        if t < 20 or not buffer.can_sample():
            continue
        on_host = buffer.sample().batch.trajectory
        _, cells, _ = draw(held.state)
        for trajectory in (on_host, jax.tree.map(np.asarray, items(held.state, cells))):
            codes = trajectory.timestep.observation["code"].astype(int)
            assert codes.shape == (cfg.unroll_length + 1, cfg.batch_size)
            assert (np.diff(codes, axis=0) == 1).all()
            assert (trajectory.timestep.step_type[0] != LAST).all()
            expected = np.array([[seen[c] for c in row] for row in codes])
            np.testing.assert_array_equal(trajectory.timestep.observation["image"], expected)
            np.testing.assert_array_equal(trajectory.agent_state, -codes[:1])
            checked += 1
    assert checked > 20


def test_its_memory_is_told_and_must_be_free(monkeypatch):
    cfg = CONFIGS["transitions"]
    # 20 items are 7 of each of 3 environments, over 7 + 2 steps. A step has six parts of one word
    # that are read at every step (step type, reward, discount, code, cost, version), two of action
    # and one of value, two bytes of image and one of level, and one word read at starts.
    rows, items = 9, 7
    words = NUM_ENVS * rows * (4 * (6 + 2 + 1) + 2 + 1) + NUM_ENVS * rows * 4
    others = items * NUM_ENVS + 4 * 6 + 8 + 4  # where items are; six numbers; a key; a priority
    assert device_bytes(cfg, NUM_ENVS, SPEC) == words + others
    monkeypatch.setattr(device_replay, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"its 1,\d\d\d bytes .* got 1,000 bytes.*place host"):
        make(cfg)


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match="uniform or prioritized"):
        make(config("fifo"))
    with pytest.raises(ValueError, match=r"Add --replay\.samples-per-insert"):
        make(config())
    buffer = make(CONFIGS["transitions"])
    good = make_transition([0, 1, 2], [0, 0, 0], [MID] * 3)
    buffer.add(np.arange(3), good)
    with pytest.raises(ValueError, match=r"all environments in order.*got \[1\]"):
        buffer.add(np.array([1]), make_transition([1], [1], [MID]))
    with pytest.raises(ValueError, match="all environments in order"):
        buffer.gap(np.array([1]))
    wrong = good.timestep._replace(reward=good.timestep.reward.astype(np.float64))
    with pytest.raises(ValueError, match=r"timestep\.reward must be float32\(3,\).*float64"):
        buffer.add(None, good._replace(timestep=wrong))
    with pytest.raises(ReplayTimeoutError, match="items must have been inserted"):
        buffer.sample()
    with pytest.raises(ValueError, match="batch_size must be that of the config, 4"):
        buffer.sample(2)
    with pytest.raises(ValueError, match="equal config"):
        buffer.load(make(config(max_size=36, samples_per_insert=1.0)).save())
    buffer.close()
    buffer.close()
    for call in (buffer.sample, buffer.save, lambda: buffer.add(None, good)):
        with pytest.raises(ReplayClosedError):
            call()
