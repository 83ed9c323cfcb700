"""Mixed precision: types of params, activations and losses; networks that are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from programs.presets import preset
from rlstack.networks import NetworkConfig, actor_critic, distributional_q_network, q_network
from rlstack.networks.base import dummy_timestep

VECTOR = specs.BoundedArray((6,), np.float32, -1, 1)
IMAGE = specs.BoundedArray((36, 36, 4), np.uint8, 0, 255)
ACTION = specs.DiscreteArray(3)
KEY = jax.random.PRNGKey(0)


def floats(tree):
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


def products(jaxpr):
    """The types of what matrix products and convolutions multiply, with those inside of calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield tuple(x.aval.dtype.name for x in equation.invars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_has_equations):
            if _has_equations(inner):
                yield from products(getattr(inner, "jaxpr", inner))


def _has_equations(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("make", "spec", "options"),
    [
        (actor_critic, VECTOR, {"norm": "layer"}),
        (actor_critic, VECTOR, {"dropout": 0.1, "skip": True}),
        (q_network, IMAGE, {"torso": "nature", "hidden_sizes": (32,), "duelling": True}),
        (q_network, IMAGE, {"torso": "impala", "hidden_sizes": (32,)}),
        (distributional_q_network, VECTOR, {"noisy_sigma": 0.5}),
    ],
)
def test_layers_multiply_in_bfloat16_and_all_else_is_float32(make, spec, options):
    plain, mixed = (
        make(spec, ACTION, NetworkConfig(dtype=dtype, **options))
        for dtype in ("float32", "bfloat16")
    )
    params = jax.jit(mixed.init)(KEY)
    jax.tree.map(np.testing.assert_array_equal, params, jax.jit(plain.init)(KEY))
    timestep = dummy_timestep(spec)
    timestep = timestep._replace(observation=jnp.ones_like(timestep.observation))

    def loss(params, network):
        output, _ = network.apply(KEY, params, timestep, ())
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(output)), output

    @jax.jit
    def both(params):
        gradient = jax.value_and_grad(loss, has_aux=True, allow_int=True)
        return *gradient(params, mixed), loss(params, plain)[1]

    (value, output), grads, exact = both(params)
    assert floats((params, value, output, grads)) == {jnp.dtype("float32")}
    traced = jax.make_jaxpr(lambda p: loss(p, mixed)[0])(params)
    found = list(products(traced.jaxpr))
    assert found and set(found) == {("bfloat16", "bfloat16")}
    for one, other in zip(jax.tree.leaves(output), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, atol=0.05, rtol=0.05)


def test_a_core_keeps_float32():
    network = actor_critic(VECTOR, ACTION, NetworkConfig(core="lstm", dtype="bfloat16"))
    state = network.initial_state(1)
    params, timestep = network.init(KEY), dummy_timestep(VECTOR)
    traced = jax.make_jaxpr(lambda p: network.apply(None, p, timestep, state))(params)
    assert floats(network.apply(None, params, timestep, state)) == {jnp.dtype("float32")}
    found = set(products(traced.jaxpr))
    assert found == {("bfloat16", "bfloat16"), ("float32", "float32")}


def test_what_needs_float32_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="float32 with batch norm and spectral norm"):
        NetworkConfig(norm="batch", dtype="bfloat16")
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16"):
        NetworkConfig(dtype="float16")
    with pytest.raises(ValueError, match="float32 for observations of entities"):
        NetworkConfig(dtype="bfloat16").require_for_entities()
    with pytest.raises(ValueError, match="dtype must be float32 with network_factory"):
        dataclasses.replace(
            preset("cartpole-ppo"),
            network=NetworkConfig(dtype="bfloat16"),
            network_factory="tests.programs.networks:make",
        )
