"""The numbers are those of JAX."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.random import threefry

WORDS = st.integers(0, 2**32 - 1)
KEYS = st.tuples(WORDS, WORDS).map(lambda words: np.array(words, np.uint32))
SHAPES = st.sampled_from([(), (1,), (7,), (3, 2), (2, 0), (64, 64)])


@settings(deadline=None)
@given(KEYS, SHAPES)
def test_bits_are_those_of_jax(key, shape):
    np.testing.assert_array_equal(threefry.bits(key, shape), jax.random.bits(key, shape))


@settings(deadline=None)
@given(KEYS, st.sampled_from([(2,), (5,), (3, 2)]))
def test_split_keys_are_those_of_jax(key, shape):
    np.testing.assert_array_equal(threefry.split(key, shape), jax.random.split(key, shape))


@settings(deadline=None)
@given(KEYS, WORDS)
def test_folded_keys_are_those_of_jax(key, number):
    expected = jax.random.fold_in(key, np.uint32(number))
    np.testing.assert_array_equal(threefry.fold_in(key, number), expected)


def test_each_of_many_keys_has_its_own_numbers():
    keys = np.asarray(jax.random.split(jax.random.PRNGKey(3), (4, 2)))
    expected = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (5,))))(keys)
    np.testing.assert_array_equal(threefry.bits(keys, (5,)), expected)
    expected = jax.vmap(jax.vmap(lambda key: jax.random.split(key, 3)))(keys)
    np.testing.assert_array_equal(threefry.split(keys, (3,)), expected)


def test_positions_have_64_bits():
    """JAX encrypts the position of a number in two words; the first is 0 in all but huge arrays."""
    key = np.array([1, 2], np.uint32)
    first, second = threefry.encrypt(key, np.array([0, 1], np.uint32), np.zeros(2, np.uint32))
    assert first[0] != first[1] and second[0] != second[1]
