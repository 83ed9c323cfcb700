"""Params from an accelerator: one transfer a version, and no bit changes."""

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.on_host import OnHost
from rlstack.acting.params import ParamsPublisher
from rlstack.rpc import codec
from tests.agent_cases import case


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
