"""Mixed precision: types of params, activations and losses; networks that are refused."""

import contextlib
import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.networks import (
    AtFractions,
    NetworkConfig,
    actor_critic,
    deterministic_policy_and_critic,
    distributional_q_network,
    feed_forward_with_state,
    from_functions,
    implicit_q_network,
    policy_and_critic,
    q_network,
    recurrent,
)
from rlstack.networks.actor_critic import policy_network
from rlstack.networks.base import dummy_timestep
from rlstack.networks.policy_and_critic import CriticInput
from rlstack.programs.config.presets import preset
from rlstack.stateful_params import StatefulParams
from tests.agent_cases import BATCH, ENTITIES, Case, settings
from tests.fused.test_fused_run import ppo as fused_ppo
from tests.fused.test_fused_run import run
from tests.programs.running import params as params_of
from tests.programs.running import series

VECTOR = specs.BoundedArray((6,), np.float32, -1, 1)
IMAGE = specs.BoundedArray((36, 36, 4), np.uint8, 0, 255)
ACTION = specs.DiscreteArray(3)
TORQUES = specs.BoundedArray((2,), np.float32, -1, 1)
KEY = jax.random.PRNGKey(0)


def floats(tree):
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


def equations(jaxpr):
    """All equations, with those inside of calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_has_equations):
            if _has_equations(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def products(jaxpr):
    """The types of what matrix products and convolutions multiply."""
    for equation in equations(jaxpr):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            yield tuple(x.aval.dtype.name for x in equation.invars)


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
    assert set(found) == {("bfloat16", "bfloat16"), ("float32", "float32")}  # heads in float32
    for one, other in zip(jax.tree.leaves(output), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, atol=0.05, rtol=0.05)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_core_keeps_float32():
    network = actor_critic(VECTOR, ACTION, NetworkConfig(core="lstm", dtype="bfloat16"))
    state = network.initial_state(1)
    params, timestep = network.init(KEY), dummy_timestep(VECTOR)
    traced = jax.make_jaxpr(lambda p: network.apply(None, p, timestep, state))(params)
    assert floats(network.apply(None, params, timestep, state)) == {jnp.dtype("float32")}
    found = set(products(traced.jaxpr))
    assert found == {("bfloat16", "bfloat16"), ("float32", "float32")}


def with_biases(tree, value):
    """Params in which each head has biases of this value."""
    if isinstance(tree, StatefulParams):
        return tree._replace(weights=with_biases(tree.weights, value))
    return {
        module: {
            name: jnp.full_like(x, value) if "head" in module and name == "b" else x
            for name, x in part.items()
        }
        for module, part in tree.items()
    }


def parts_of(make):
    """A policy and its critic, each as the factory of one network."""
    return [lambda *args, name=name: getattr(make(*args), name) for name in ("policy", "critic")]


@pytest.mark.parametrize(
    ("make", "action", "options"),
    [
        (actor_critic, ACTION, {}),
        pytest.param(
            actor_critic,
            ACTION,
            {"shared": True, "norm": "layer"},
            marks=[pytest.mark.slow, pytest.mark.chosen],
        ),
        (actor_critic, ACTION, {"core": "gru"}),
        (policy_network, ACTION, {}),
        (q_network, ACTION, {}),
        pytest.param(
            q_network,
            ACTION,
            {"duelling": True, "noisy_sigma": 0.1},
            marks=[pytest.mark.slow, pytest.mark.chosen],
        ),
        pytest.param(
            q_network, ACTION, {"dropout": 0.1}, marks=[pytest.mark.slow, pytest.mark.chosen]
        ),
        (distributional_q_network, ACTION, {"num_atoms": 5, "duelling": True}),
        (implicit_q_network, ACTION, {}),
        *[
            pytest.param(make, TORQUES, {}, marks=[pytest.mark.slow, pytest.mark.chosen])
            for make in parts_of(policy_and_critic)
        ],
        *[(make, TORQUES, {}) for make in parts_of(deterministic_policy_and_critic)],
    ],
)
def test_heads_keep_the_digits_of_float32(make, action, options):
    """Biases of 100 move outputs by 100, which in bfloat16 would be rounded to multiples of 0.5."""
    rng, size = np.random.default_rng(0), 16
    network = make(VECTOR, action, NetworkConfig(dtype="bfloat16", **options))
    observation = rng.normal(size=(size, 6)).astype(np.float32)
    params = jax.jit(network.init)(KEY)
    if make is implicit_q_network:
        observation = AtFractions(observation, rng.uniform(size=(size, 4)).astype(np.float32))
    elif any(x.shape == (8, 64) for x in jax.tree.leaves(params)):
        observation = CriticInput(observation, observation[:, :2])
    timestep = dummy_timestep(VECTOR, size)._replace(observation=observation)

    @jax.jit
    def outputs(bias):
        state = network.initial_state(size)
        return network.apply(None, with_biases(params, bias), timestep, state)[0]

    for low, high in zip(*map(jax.tree.leaves, (outputs(0), outputs(100))), strict=True):
        assert np.ptp(low) > 0.001
        np.testing.assert_allclose(np.asarray(high) - 100, low, atol=1e-4)


def test_outputs_of_any_network_are_float32_so_that_losses_are():
    def in_half(x):
        return hk.Linear(2)(x.astype(jnp.bfloat16))

    for network in (
        feed_forward_with_state(lambda x, is_training: in_half(x), VECTOR),
        from_functions(*hk.transform(in_half), VECTOR),
        recurrent(in_half, lambda: hk.GRU(3), lambda hidden, _: in_half(hidden), VECTOR),
    ):
        args = jax.eval_shape(network.init, KEY), dummy_timestep(VECTOR), network.initial_state(1)
        several = jax.tree.map(lambda x: x[None], args[1])
        for found in (
            jax.eval_shape(network.apply, None, *args),
            jax.eval_shape(network.unroll, None, args[0], several, args[2]),
        ):
            assert found[0].dtype == jnp.float32


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


# Of means, norms, softmax, losses and draws. Layers and activations have no such operation.
_NEEDS_DIGITS = {
    *("reduce_max", "reduce_prod", "argmax", "argmin", "sort", "cumsum", "cumlogsumexp", "cumprod"),
    *("log", "log1p", "erf_inv", "sqrt", "rsqrt", "gather"),
}


def one_of_each_agent():
    """The first setting of each agent whose networks can have another precision."""
    found = {}
    for name, setting in settings().items():
        with contextlib.suppress(ValueError):
            network = dataclasses.replace(setting.network, dtype="bfloat16")
            if setting.obs_spec is not ENTITIES and setting.network.torso != "nature":
                found.setdefault(type(setting.cfg), (name, setting._replace(network=network)))
    return dict(found.values())


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", one_of_each_agent())
def test_losses_and_results_of_every_agent_are_float32(name):
    setting = one_of_each_agent()[name]
    c = Case(setting)
    params = jax.eval_shape(c.agent.initial_params, c.key)
    learner_state = jax.eval_shape(c.agent.initial_learner_state, c.key, params)
    state = jax.eval_shape(lambda: c.agent.initial_state(BATCH))
    timestep = jax.tree.map(lambda x: x[0], c.batch.trajectory.timestep)
    acts = jax.make_jaxpr(c.agent.actor_step)(c.key, params, timestep, state)
    learns = jax.make_jaxpr(c.agent.learner_step)(params, learner_state, c.batch)
    for traced in (acts, learns):
        results = {x.aval.dtype.name for x in traced.jaxpr.outvars}
        low = {
            equation.primitive.name
            for equation in equations(traced.jaxpr)
            for x in equation.invars
            if getattr(x.aval, "dtype", None) == jnp.bfloat16
        }
        assert "bfloat16" not in results and not low & _NEEDS_DIGITS


@pytest.mark.slow
@pytest.mark.chosen
def test_a_compiled_loop_learns_in_bfloat16_what_it_learns_in_float32(tmp_path):
    losses = []
    for dtype in ("float32", "bfloat16"):
        network = NetworkConfig(hidden_sizes=(16,), dtype=dtype)
        run(fused_ppo(network=network, updates=6), tmp_path / dtype)
        assert {x.dtype.name for x in params_of(tmp_path / dtype)} == {"float32"}
        losses.append(np.mean(series(tmp_path / dtype, "learner/value_loss")))
    np.testing.assert_allclose(*losses, rtol=0.1)
