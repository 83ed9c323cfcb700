"""Rows of many bytes, which are copied in another way than small ones."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from rlstack.replay import InProcessReplay, SharedMemReplayBuffer
from rlstack.replay.memory import spec_bytes
from rlstack.replay.shared_memory.steps import total_bytes
from rlstack.replay.storage import StepRing, as_words, copy_words
from rlstack.types import StartSpec, StepType, TimeStep, Transition
from tests.replay.replay_model import config

NUM_ENVS, SIZE = 4, (40, 1000)  # more than 64 KiB of one environment, whatever the dtype
DTYPES = [np.uint8, np.bool_, np.float32, np.int64, ml_dtypes.bfloat16]


def make_step(observation):
    zeros = np.zeros(len(observation), np.float32)
    step_type = np.full(len(observation), StepType.MID, np.int32)
    return Transition(TimeStep(step_type, zeros, zeros, observation), (), (), zeros.astype(int))


def make_observation(seed, dtype, num_envs=NUM_ENVS):
    return np.random.default_rng(seed).integers(0, 2, (num_envs, *SIZE)).astype(dtype)


def make_ring(sampler, dtype):
    ring = StepRing(config(sampler, unroll_length=2, max_size=8), NUM_ENVS)
    step = make_step(make_observation(0, dtype))
    ring.allocate(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step))
    return ring


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampler", ["fifo", "uniform"])  # fifo repeats rows at the end
def test_large_rows_are_stored_whole(sampler, dtype):
    ring, written = make_ring(sampler, dtype), []
    for i in range(ring.rows + 1):
        written.append(make_observation(i, dtype))
        ring.write_all(i, ring.leaves(make_step(written[i]), NUM_ENVS))
    start = ring.rows + 1 - 3
    view = ring.view(start, 0, NUM_ENVS) if sampler == "fifo" else None
    found = ring.gather(np.full(NUM_ENVS, start), np.arange(NUM_ENVS))
    for trajectory in (view, found):
        if trajectory is not None:
            np.testing.assert_array_equal(trajectory.timestep.observation, written[start:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_rows_of_some_environments_leave_the_others(dtype):
    ring = make_ring("uniform", dtype)
    everyone, some = make_observation(1, dtype), make_observation(2, dtype, 2)
    ring.write_all(0, ring.leaves(make_step(everyone), NUM_ENVS))
    columns = ring.columns(slice(1, 3))
    ring.write_columns(0, columns, ring.leaves(make_step(some), 2))
    stored = ring.save(1).timestep.observation[0]
    np.testing.assert_array_equal(stored, np.concatenate([everyone[:1], some, everyone[3:]]))


@pytest.mark.parametrize("make", [np.asfortranarray, jax.numpy.asarray, np.flip])
def test_any_array_is_a_source(make):
    source = make(np.random.default_rng(0).random((NUM_ENVS, *SIZE), np.float32))
    ring = np.zeros((2, NUM_ENVS, *SIZE), np.float32)
    copy_words(as_words(ring)[1], source)
    np.testing.assert_array_equal(ring, [np.zeros_like(source), np.asarray(source)])


@pytest.mark.parametrize("width", [1 << 17, (1 << 17) - 4, (1 << 17) - 1])
@pytest.mark.parametrize("offset", [1, 8, 16])
def test_sources_at_any_address_and_of_any_number_of_bytes(offset, width):
    memory = np.random.default_rng(0).integers(0, 256, width + 64).astype(np.uint8)
    source = memory[offset : offset + width][None]
    ring = np.zeros((2, 1, width), np.uint8)
    copy_words(as_words(ring)[1], source)
    np.testing.assert_array_equal(ring, [np.zeros_like(source), source])


def step_with_states(step, num_envs, widths):
    """A step with states of these widths: the step's number times 10, plus the environment."""
    values = 10.0 * step + np.arange(num_envs, dtype=np.float32)
    states = [np.repeat(values[:, None], width, axis=1) for width in widths]
    return make_step(values)._replace(agent_state=states)


def start_specs(widths, num_envs=2):
    step = step_with_states(0, num_envs, widths)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step)
    return spec._replace(agent_state=[StartSpec((width,), np.float32) for width in widths])


@pytest.mark.parametrize("width", [1, 20_000])  # a small row and a large one
@pytest.mark.parametrize("sampler", ["fifo", "uniform"])
def test_start_leaves_have_a_row_for_each_start(sampler, width):
    # 3 starts of 2 environments: steps 0, 3, ... The ring holds 3 * 3 + 4 = 13 steps, fifo's 15.
    cfg = config(sampler, batch_size=2, unroll_length=4, period=3, max_size=6, max_size_per_env=3)
    ring = StepRing(cfg, 2)
    ring.allocate(start_specs([width]))
    columns = ring.columns(slice(0, 2))
    for step in range(32):
        leaves = ring.leaves(step_with_states(step, 2, [width]), 2)
        if step % 4 == 0:
            ring.write_all(step, leaves)
        elif step % 4 == 1 and sampler == "uniform":  # columns have no mirror
            ring.write_columns(step, columns, leaves)
        else:  # in another order
            ring.write(np.full(2, step), np.array([1, 0]), [leaf[::-1] for leaf in leaves])
    assert [len(x) for x in ring._rings if x.ndim == 3] == [5]
    batch = ring.gather(np.array([27, 21, 24]), np.array([0, 1, 1]))
    assert batch.agent_state[0].shape == (1, 3, width)
    assert batch.agent_state[0][0, :, -1].tolist() == [270, 211, 241]
    assert batch.timestep.observation[:, 1].tolist() == [211, 221, 231, 241, 251]
    ring.gather_again(batch, np.array([1]), np.array([18]), np.array([0]))
    assert batch.agent_state[0][0, :, 0].tolist() == [270, 180, 241]
    if sampler == "fifo":
        view = ring.view(27, 0, 2)
        assert view.agent_state[0][:, :, 0].tolist() == [[270, 271]]
        assert view.timestep.observation[:, 1].tolist() == [271, 281, 291, 301, 311]
        assert np.shares_memory(view.agent_state[0], ring._rings[4])


@pytest.mark.parametrize("backend", [InProcessReplay, SharedMemReplayBuffer])
def test_states_at_starts_outlive_gaps_and_a_resume(backend):
    # Items of 2 transitions start at every second step; 4 of each environment are held.
    cfg = config(batch_size=2, unroll_length=2, period=2, max_size=8)

    def add(buffer, first, last, broken=()):
        for step in range(first, last):
            buffer.add(None, step_with_states(step, 2, [1, 3]))
            if step in broken:
                buffer.gap(np.array([1]))

    def firsts(buffer):
        batch = buffer.sample(200).batch.trajectory
        state, wide = batch.agent_state
        assert state.shape == (1, 200, 1) and wide.shape == (1, 200, 3)
        np.testing.assert_array_equal(state[0, :, 0], batch.timestep.observation[0])
        np.testing.assert_array_equal(wide[0, :, 2], batch.timestep.observation[0])
        return set(state.ravel().tolist())

    buffer = backend(cfg, 2, seed=0, spec=start_specs([1, 3]))
    # The gap after step 20 moves environment 1 on by one place: its items begin at odd steps.
    add(buffer, 0, 27, broken=[20])
    assert firsts(buffer) == {180, 200, 220, 240, 181, 211, 231}
    saved = buffer.save()
    assert [len(x) for x in saved["steps"].agent_state] == [5, 5]
    again = backend(cfg, 2, seed=0, spec=start_specs([1, 3]))
    again.load(saved)
    assert firsts(again) == firsts(buffer)
    add(again, 27, 33)
    assert firsts(again) == {240, 260, 280, 300, 231, 251, 271, 291}
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start_specs([1, 3]))
    with pytest.raises(ValueError, match="Set reads_first_state = True"):
        backend(cfg, 2, seed=0, spec=plain).load(saved)
    for each in (buffer, again):
        each.close()


@pytest.mark.parametrize("sampler", ["fifo", "uniform"])
def test_the_bytes_of_start_leaves_are_those_of_their_rows(sampler):
    # 100 starts of 2 environments, 5 steps apart: 100 * 5 + 10 steps, of which 102 are starts.
    cfg = config(
        sampler, batch_size=2, unroll_length=10, period=5, max_size=200, max_size_per_env=100
    )
    spec = start_specs([1000])
    without, wide = (spec_bytes(cfg, s, 2) for s in (spec._replace(agent_state=[]), spec))
    batches = 2 * 2  # two batches of two items
    assert wide - without == (102 * 2 + batches) * 4000
    steps, reader = zip(
        *(total_bytes(cfg, 2, s) for s in (spec._replace(agent_state=[]), spec)), strict=True
    )
    spare = 0 if sampler == "fifo" else 31  # rows // 16 more steps, for items drawn meanwhile
    assert steps[1] - steps[0] == -(-(510 + spare) // 5) * 2 * 4000
    assert reader[1] - reader[0] == batches * 4000
