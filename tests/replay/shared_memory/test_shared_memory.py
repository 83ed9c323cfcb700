"""Behaviour of the shared buffer beyond the contract, tested inside one process."""

from __future__ import annotations

import dataclasses
import os
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.replay import (
    InProcessReplay,
    ReplayClosedError,
    SharedMemReplayBuffer,
    memory,
)
from rlstack.replay.shared_memory import writer as shm_writer
from rlstack.replay.shared_memory.block import FOLDER
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
from tests.replay.test_replay_contract import histories, step_types


def held(buffer) -> set[int]:
    buffer.stats()
    keys = buffer._table.sampler.key_at
    return set(keys[keys >= 0].tolist())


def test_a_handle_is_small_and_pickles_and_so_does_the_buffer(make):
    buffer = make(4, max_size=400)
    assert len(pickle.dumps(buffer)) < 3000
    writer = pickle.loads(pickle.dumps(buffer))
    assert isinstance(writer, shm_writer.SharedMemWriter)
    feed(writer, 4, 0, 8)
    assert len(drawn(buffer.sample())) == 4 and buffer.stats()["inserts"] == 20
    # The next writer of an environment does not continue the earlier steps.
    other = buffer.handle().writer(1, 2)
    other.add(np.array([2, 3]), make_transition([2, 3], [8, 8], [MID, MID]))
    assert buffer.stats()["inserts"] == 20
    feed(buffer, 2, 0, 0)
    with pytest.raises(ReplayClosedError, match=r"\[2, 3\] have another writer"):
        writer._next_check = 0.0
        feed(writer, 4, 8, 9)


def test_sizes_are_given_and_what_does_not_fit_is_refused_before_anything_is_made(
    make, monkeypatch, caplog
):
    caplog.set_level("INFO")
    buffer = make(4, max_size=400)
    *_, number, _ = buffer.handle().name.split("-")
    status = os.fstat(int(number.removeprefix("fd")))
    assert status.st_size == buffer.num_bytes
    assert status.st_blocks * 512 >= buffer.num_bytes  # all memory is allocated at once
    assert f"{buffer.num_bytes:,} bytes in" in caplog.text
    before = sorted(os.listdir(FOLDER))
    with pytest.raises(ValueError, match="must fit into what is free of"):
        make(4, max_size=10**13)
    free = os.statvfs(FOLDER)
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    with pytest.raises(ValueError, match=f"must fit into what is free of {FOLDER}"):
        make(4, max_size=free.f_bavail * free.f_frsize // 8)
    assert sorted(os.listdir(FOLDER)) == before


@settings(max_examples=100, deadline=None)
@given(history=histories(), polls=st.randoms(use_true_random=False))
def test_gaps_and_wraps_between_two_looks_are_seen(history, polls):
    """A reader that polls irregularly holds the same items as one that polls after each step."""
    cfg, num_envs, calls, seed = history
    sampler = "uniform" if cfg.sampler == "fifo" else cfg.sampler
    changes = {"max_times_sampled": 0, "samples_per_insert": None}
    cfg = dataclasses.replace(cfg, sampler=sampler, **changes)
    rng, model = np.random.default_rng(seed), Model(cfg, num_envs)
    buffer = SharedMemReplayBuffer(cfg, num_envs, seed=0, spec=SPEC)
    writer = buffer.handle().attach()
    lapped = False
    for name, ids, count in calls:
        envs = range(num_envs) if ids is None else ids
        array = None if ids is None else np.array(ids)
        for _ in range(count if name == "add" else 1):
            if name == "add":
                types = step_types(model, envs, rng)
                ordinals = [model.ordinal[e] for e in envs]
                writer.add(array, make_transition(envs, ordinals, types))
                for env, step_type in zip(envs, types, strict=True):
                    model.add(env, step_type)
            elif name == "gap":
                writer.gap(array)
                for env in envs:
                    model.gap(env)
        reader, table = buffer._reader, buffer._table
        missed = reader._items_ended(reader._numbers.steps) - reader._items_ended(
            table.counter.steps
        )
        lapped |= bool((missed > table.items).any())  # counts broken items as whole
        if polls.random() < 0.4:
            expected = {item.turn * num_envs + item.env for item in model.items}
            assert held(buffer) == expected
            assert lapped or buffer._table.inserts == model.inserts
            if buffer.can_sample(5):
                got = drawn_from(buffer, model)
                assert got <= {(i.env, i.first) for i in model.items}
    buffer.close()


def drawn_from(buffer, model) -> set:
    from tests.replay.replay_model import items_of

    return set(items_of(buffer.sample(5).batch.trajectory, model.step_types))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("sampler", ["fifo", "uniform"])
@pytest.mark.parametrize("instant", range(6))
def test_a_writer_killed_at_any_instant_leaves_nothing_to_see(make, monkeypatch, sampler, instant):
    buffer = make(2, sampler, max_size=6, batch_size=2)
    writer = buffer.handle().attach()
    feed(writer, 2, 0, 4)
    taken, before = [], held(buffer)
    for step in range(4, 7):
        writer = buffer.handle().attach() if step == 5 else writer
        if step == 4:
            with monkeypatch.context() as patch:
                dies_at(patch, writer, instant)
                with pytest.raises(Killed):
                    feed(writer, 2, step, step + 1)
        assert held(buffer) == before
        taken += drawn(buffer.sample()) if buffer.can_sample() else []
        before = held(buffer)
    # The next writer starts new streams, overwrites the rest, and fills the ring more than once.
    writer, first = buffer.handle().attach(), 1000
    for step in range(first, first + 40):
        feed(writer, 2, step, step + 1)
        taken += (
            [item for sample in [buffer.sample()] for item in drawn(sample)]
            if (buffer.can_sample())
            else []
        )
    assert all(start == 0 or start >= first for _, start in taken)
    assert {start for _, start in taken} > {0} and max(taken)[1] > first + 30


def dies_at(patch, writer, instant) -> None:
    """Makes the next write fail at one instant: before, between or after its parts."""

    def die(*_):
        raise Killed

    ring = writer._shared.ring

    def half(step, columns, leaves):
        for column in columns[: len(leaves) // 2]:
            column[step % ring.rows] = 77
        raise Killed

    def all_but_publish(*arguments):
        write(*arguments)
        raise Killed

    write = ring.write_columns
    fences = iter([None, die] if instant == 5 else [die])
    if instant in (0, 5):
        patch.setattr(shm_writer, "memory_fence", lambda: (next(fences) or (lambda: None))())
    if instant == 1:
        patch.setattr(ring, "write_columns", die)
    if instant == 2:
        patch.setattr(ring, "write_columns", half)
    if instant == 3:
        patch.setattr(writer, "_mark_all", die)
    if instant == 4:
        patch.setattr(ring, "write_columns", all_but_publish)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_what_is_overwritten_while_it_is_copied_is_drawn_anew(make, monkeypatch, sampler):
    buffer = make(2, sampler, max_size=16, batch_size=16)
    writer, step = buffer.handle().attach(), [40]
    feed(writer, 2, 0, 40)
    ring = buffer._table.ring
    gather = ring.gather

    def slow_gather(starts, env_ids):
        batch = gather(starts, env_ids)
        feed(writer, 2, step[0], step[0] + 7)  # writes more than the spare rows
        step[0] += 7
        gathered = gather(starts, env_ids)  # as if the writes had happened during the gather
        del batch
        return gathered

    monkeypatch.setattr(ring, "gather", slow_gather)
    for _ in range(5):
        assert all(start > step[0] - 7 - 20 for _, start in drawn(buffer.sample()))
    assert buffer.stats()["redrawn"] > 0


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("period", [None, 2])
def test_no_item_begins_at_the_end_of_an_episode(make, unroll, period):
    """Episodes end rarely or one after the other, and steps come together or in parts."""
    period = None if period and unroll < period else period
    changes = {"unroll_length": unroll, "period": period, "max_size": 4000, "starts": "not_last"}
    shared, cfg = make(4, **changes), config(**changes)
    local, writer = InProcessReplay(cfg, 4, seed=0), shared.handle().attach()
    rng = np.random.default_rng(unroll)
    for step in range(300):
        often = 0.5 if 100 <= step < 150 else 0.02
        types = np.where(rng.random(4) < often, LAST, rng.integers(FIRST, MID + 1, 4))
        parts = [[0, 1], [2, 3]] if 200 <= step < 230 else [[0, 1, 2, 3]]
        for buffer in (local, writer):
            for envs in parts:
                made = make_transition(envs, [step] * len(envs), types[envs])
                buffer.add(np.array(envs) if len(parts) > 1 else None, made)
        if step == 250:
            local.gap(np.array([1]))
            writer.gap(np.array([1]))
    assert len(held(local)) > 100 and held(shared) == held(local)


@pytest.mark.parametrize("spec", [None, SPEC])  # without it, all leaves are saved at every step
@pytest.mark.parametrize("period", [None, 2])
@pytest.mark.parametrize("sampler", ["fifo", "uniform", "prioritized"])
@pytest.mark.parametrize("steps", [0, 5, 21, 60])
def test_checkpoints_cross_between_backends(make, sampler, steps, period, spec):
    changes = {"max_size": 24, "max_size_per_env": 6, "period": period}
    cfg = config(sampler, **changes)
    local, shared = InProcessReplay(cfg, 4, seed=3, spec=spec), make(4, sampler, **changes)
    for step in range(steps):
        feed(local, 4, step, step + 1)
        if sampler == "fifo" and local.stats()["size"] > 12:
            local.sample()
    if steps:
        local.add(np.array([2]), make_transition([2], [steps], [MID]))
    shared.load(local.save())
    back, again = (InProcessReplay(cfg, 4, seed=9, spec=SPEC) for _ in range(2))
    back.load(shared.save())
    again.load(local.save())
    for buffer in (local, shared, back, again):
        rest = [0, 1, 3] if steps else range(4)
        buffer.add(np.array(rest), make_transition(rest, [steps] * len(rest), [MID] * len(rest)))
        feed(buffer, 4, steps + 1, steps + (5 if steps else 11))
    for size in (4, 2, 3):
        samples = [buffer.sample(size) for buffer in (local, shared, back, again)]
        for sample in samples[1:]:
            assert drawn(sample) == drawn(samples[0])
            np.testing.assert_array_equal(sample.keys, samples[0].keys)
            np.testing.assert_array_equal(sample.batch.weights, samples[0].batch.weights)
    assert {**shared.stats(), **local.stats()} == shared.stats()


def test_so_many_environments_that_even_small_leaves_have_large_rows(make):
    num_envs = 1 << 14  # a row of step types has 64 KiB
    buffer = make(num_envs, max_size=num_envs * 4, unroll_length=1, starts="not_last")
    writer = buffer.handle().attach()
    types = np.random.default_rng(0).choice([MID, LAST], (3, num_envs)).astype(np.int32)
    feed(writer, num_envs, 0, 3, versions=lambda t: t, step_types=lambda t: types[t])
    items = buffer.sample(2000, timeout=5)
    found = items.batch.trajectory
    assert found.timestep.step_type.dtype == found.params_version.dtype == np.int32
    first, env_ids = np.divmod(items.keys.astype(np.int64), num_envs)
    assert set(first.tolist()) == {0, 1}
    for step in (0, 1):
        np.testing.assert_array_equal(found.timestep.step_type[step], types[first + step, env_ids])
        np.testing.assert_array_equal(found.params_version[step], first + step)
    assert (found.timestep.step_type[0] != LAST).all()
    assert buffer.stats()["inserts"] == np.count_nonzero(types[:2] != LAST)


def test_jax_specs_and_arrays_serve_as_well(make):
    spec = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), SPEC)
    buffer = SharedMemReplayBuffer(config(), 2, seed=0, spec=spec)
    feed(pickle.loads(pickle.dumps(buffer)), 2, 0, 6)
    assert len(drawn(buffer.sample())) == 4
    buffer.close()
