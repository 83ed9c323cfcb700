"""Packed results are the results, bit for bit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.packing import Packing


class Output(NamedTuple):
    action: dict
    value: jax.Array


TREES = {
    "mixed": lambda n: (
        Output(
            {"a": jnp.arange(n, dtype=jnp.int32), "b": jnp.ones((n, 2, 3), bool)},
            jnp.full((n,), jnp.nan),
        ),
        (jnp.arange(2 * n, dtype=jnp.uint32).reshape(n, 2), jnp.zeros((n, 3), jnp.bfloat16)),
    ),
    "words": lambda n: [jnp.linspace(-1, 1, n), jnp.zeros((n, 0))],
    "others": lambda n: jnp.zeros(n, jnp.uint8),
    "nothing": lambda n: ((), {}),
}


@pytest.mark.parametrize("name", TREES)
def test_trees_come_back_as_they_were(name):
    packing = Packing()
    pack = jax.jit(lambda tree, size: packing.pack(size, tree), static_argnums=1)
    for size in (3, 1, 3):
        tree = TREES[name](size)
        packed = pack(tree, size)
        found = packing.unpack(size, packed)
        jax.tree.map(np.testing.assert_array_equal, found, tree)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
            assert isinstance(x, np.ndarray) and x.dtype == y.dtype
            assert not x.flags.writeable
    assert len(packed) == {"mixed": 3, "words": 1, "others": 1, "nothing": 0}[name]
