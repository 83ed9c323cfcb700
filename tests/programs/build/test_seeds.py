"""Keys of roles are those that JAX derives, without a compiled function."""

from __future__ import annotations

import functools
import zlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.programs.build.seeds import acting_key, role_key, role_seed


def _by_jax(seed: int, role: str, rank: int) -> jax.Array:
    numbers = zlib.crc32(role.encode()) & 0x7FFFFFFF, rank
    return functools.reduce(jax.random.fold_in, numbers, jax.random.PRNGKey(seed))


@settings(deadline=None)
@given(st.integers(0, 2**33), st.text(max_size=12), st.integers(0, 2**31 - 1))
def test_keys_are_those_of_jax(seed, role, rank):
    np.testing.assert_array_equal(role_key(seed, role, rank), _by_jax(seed, role, rank))


def test_keys_are_arrays_that_jax_accepts():
    key = role_key(3, "learner")
    assert isinstance(key, jax.Array) and key.dtype == np.uint32
    assert jax.random.split(key).shape == (2, 2)


def test_each_role_rank_and_incarnation_has_its_own_key():
    keys = [role_key(1, "learner"), role_key(2, "learner"), role_key(1, "evaluator")]
    keys += [acting_key(1, 0), acting_key(1, 1), acting_key(1, 0, 1), acting_key(1, 1, 1)]
    assert len({tuple(np.asarray(key)) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("seed", "role", "rank", "expected"),
    [
        (0, "env", 0, 160135686),
        (0, "env", 1, 961045055),
        (1, "env", 0, 347922636),
        (0, "evaluator", 0, 967469327),
    ],
)
def test_seeds_of_roles_stay_the_same_numbers(seed, role, rank, expected):
    assert role_seed(seed, role, rank) == expected


def test_an_acting_key_is_that_of_the_inferencer_and_its_incarnation():
    for rank, incarnation in ((0, 0), (2, 0), (2, 3)):
        expected = _by_jax(5, "inferencer", rank)
        if incarnation:
            expected = jax.random.fold_in(expected, incarnation)
        np.testing.assert_array_equal(acting_key(5, rank, incarnation), expected)


@pytest.mark.parametrize("setting", [("jax_default_prng_impl", "rbg"), ("jax_enable_x64", True)])
def test_other_settings_of_jax_are_heeded(setting):
    before = getattr(jax.config, setting[0])
    jax.config.update(*setting)
    try:
        for seed in (5, 2**40 + 5):
            np.testing.assert_array_equal(role_key(seed, "actor", 2), _by_jax(seed, "actor", 2))
    finally:
        jax.config.update(setting[0], before)
