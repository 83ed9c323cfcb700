"""Packed results, and params from an accelerator: one transfer, and no bit changes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.packing import OnHost, Packing
from rlstack.acting.params import ParamsPublisher
from rlstack.rpc import codec
from tests.agent_cases import case


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


def test_a_version_is_one_transfer_of_the_size_of_the_params():
    params = case("ppo-image").params
    leaves = jax.tree.leaves(params)
    on_host = OnHost(from_cpu=True)
    for version in (1, 2):
        copied = on_host(params)
        assert on_host.transfers == version and len(leaves) > 8
        assert on_host.transferred_bytes == version * sum(leaf.nbytes for leaf in leaves)
    assert jax.tree.structure(copied) == jax.tree.structure(params)
    for one, other in zip(jax.tree.leaves(copied), leaves, strict=True):
        assert isinstance(one, np.ndarray)
        np.testing.assert_array_equal(one, other, strict=True)


def test_other_types_keep_arrays_of_their_own():
    on_host = OnHost(from_cpu=True)
    tree = {"half": jnp.ones(3, jnp.bfloat16), "count": jnp.int32(4), "w": jnp.arange(5.0)}
    copied = on_host(tree)
    assert on_host.transfers == 2 and copied["half"].dtype == jnp.bfloat16
    assert copied["count"] == 4 and copied["w"].tolist() == [0, 1, 2, 3, 4]


def test_many_readers_of_a_version_cause_one_transfer():
    class Source:
        version = 1

        def get_params(self, newer_than=-1):
            return (self.version, case("dqn").params) if self.version > newer_than else None

    on_host = OnHost(from_cpu=True)
    publisher = ParamsPublisher(Source(), lambda params: codec.encode(on_host(params)))
    answers = [publisher.get() for _ in range(3)]
    assert on_host.transfers == 1 and len({id(encoded) for _, encoded in answers}) == 1
    Source.version = 2
    publisher.get(1)
    assert on_host.transfers == 2


def test_params_on_a_cpu_are_not_copied():
    params, on_host = case("dqn").params, OnHost()
    assert on_host(params) is params and on_host.transfers == 0
