"""Rows of many bytes, which are copied in another way than small ones."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from rlstack.replay.storage import StepRing, as_words, copy_words
from rlstack.types import StepType, TimeStep, Transition
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
    stored = ring.pick(np.zeros(NUM_ENVS, int), np.arange(NUM_ENVS)).timestep.observation
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
