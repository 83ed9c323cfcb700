import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.math.shuffle import permutations

# Each operation outside jit is compiled for itself, for each shape; inside, once for each size.
_permutations = jax.jit(permutations, static_argnums=(1, 2))


@pytest.mark.slow
@pytest.mark.chosen
@settings(max_examples=50, deadline=None)
@given(  # sorted ones below 64; at, next to and far from a power of two
    size=st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 300, 511, 700]),
    seed=st.integers(0, 2**31 - 1),
)
def test_each_is_an_order_of_all_rows(size, seed):
    orders = _permutations(jax.random.PRNGKey(seed), 3, size)
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders, axis=-1), np.tile(np.arange(size), (3, 1)))


@pytest.mark.parametrize("size", [64, 100, 1024])
def test_every_row_may_come_anywhere(size):
    keys = jax.random.split(jax.random.PRNGKey(0), 40)
    orders = np.concatenate([_permutations(key, 100, size) for key in keys])
    blocks = 8
    counts = np.zeros((blocks, blocks))
    np.add.at(counts, (np.arange(size) * blocks // size, orders * blocks // size), 1)
    expected = np.outer(counts.sum(1), counts.sum(0)) / counts.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 90  # 49 degrees of freedom: above 90 with probability 0.0003
    # Neighbours do not stay together: their distance is that of independent draws, size / 3.
    assert np.abs(np.diff(orders)).mean() == pytest.approx(size / 3, rel=0.02)


def test_keys_give_orders_of_their_own():
    first, second = permutations(jax.random.PRNGKey(1), 2, 256)
    third = permutations(jax.random.PRNGKey(2), 1, 256)[0]
    for a, b in ((first, second), (first, third), (second, third)):
        assert (np.asarray(a) == np.asarray(b)).sum() < 10


def test_with_and_without_jit():
    key = jax.random.PRNGKey(3)
    jitted = jax.jit(permutations, static_argnums=(1, 2))(key, 2, 130)
    np.testing.assert_array_equal(permutations(key, 2, 130), jitted)
