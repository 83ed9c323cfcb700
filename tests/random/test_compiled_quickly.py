"""The results are those of `jax.jit`, and the host makes all random bits that it can."""

from __future__ import annotations

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.random.compiled_quickly import CompiledQuickly
from tests.agent_cases import case

KEY = jax.random.PRNGKey(7)
LEVEL_1 = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def _draws(key):
    """Draws in many ways."""
    first, second, third = jax.random.split(key, 3)
    many = jax.random.split(jax.random.fold_in(third, 4), 5)
    return {
        "normal": jax.random.normal(first, (3, 4)),
        "uniform": jax.vmap(lambda k: jax.random.uniform(k, (2,)))(many),
        "integers": jax.random.randint(many[2], (6,), 0, 100),
        "permutation": jax.random.permutation(many[-1], 9),
        "bool": jax.random.bernoulli(second),
        "bits": jax.random.bits(second, (3,), jnp.uint8),
        "keys": many,
        "key": first,
    }


def _in_loops(key):
    """Draws in a loop and in a branch, with keys that the host has split."""

    def step(carry, key):
        return carry + jax.random.normal(key), jax.random.uniform(key)

    key, once = jax.random.split(key)
    sums, all_ = jax.lax.scan(step, 0.0, jax.random.split(key, 4))
    return jax.lax.cond(jax.random.bernoulli(once), jnp.sin, jnp.cos, sums), all_


def _network(key):
    def forward(x):
        x = hk.Linear(8, w_init=hk.initializers.Orthogonal())(x)
        return hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.5, x))

    net = hk.transform(forward)
    init_key, key = jax.random.split(key)
    params = net.init(init_key, jnp.ones((2, 4)))
    return params, params, net.apply(params, key, jnp.ones((2, 4)))


def _same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype and x.weak_type == y.weak_type
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("function", [_draws, _in_loops, _network])
def test_results_are_those_of_jit(function):
    ours = CompiledQuickly(function)
    for seed in 7, 8:
        _same(ours(jax.random.PRNGKey(seed)), LEVEL_1(function)(jax.random.PRNGKey(seed)))
    keys = jax.random.split(KEY, 3)
    _same(CompiledQuickly(jax.vmap(function))(keys), LEVEL_1(jax.vmap(function))(keys))


@pytest.mark.parametrize("name", ["dqn", "ppo-lstm", "sac"])
def test_initial_params_and_states_of_agents_are_those_of_jit(name):
    agent = case(name).agent
    _same(CompiledQuickly(agent.initial_params)(KEY), LEVEL_1(agent.initial_params)(KEY))
    params = CompiledQuickly(agent.initial_params)(KEY)
    begin = agent.initial_learner_state
    _same(CompiledQuickly(begin)(KEY, params), LEVEL_1(begin)(KEY, params))


def test_xla_gets_bits_and_draws_none(compilations):
    """A function of one weight is compiled once, for all keys, without a loop of Threefry."""
    ours = CompiledQuickly(hk.transform(lambda: hk.Linear(64)(jnp.ones((1, 64)))).init)
    with compilations() as compiled:
        for seed in range(3):
            ours(np.array([0, seed], np.uint32))
    assert len(compiled) == 1
    (parts,) = ours._parts.values()
    names = {step.equation.primitive.name for step in parts._rest}
    assert not any(name.startswith("random") for name in names)
    assert [(x.aval.shape, x.aval.dtype) for x in parts._crossing] == [((64, 64), np.uint32)]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "setting", [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)]
)
def test_numbers_that_the_host_cannot_draw_are_drawn_by_xla(setting):
    before = getattr(jax.config, setting[0])
    jax.config.update(*setting)
    try:
        key = jax.random.PRNGKey(3)
        _same(CompiledQuickly(_draws)(key), LEVEL_1(_draws)(key))
    finally:
        jax.config.update(setting[0], before)


def test_typed_keys_are_taken_as_they_are():
    key = jax.random.key(3)
    found, expected = CompiledQuickly(_in_loops)(key), LEVEL_1(_in_loops)(key)
    _same(found, expected)


def test_shapes_of_results_need_no_compilation(compilations):
    ours = CompiledQuickly(_network)
    with compilations() as compiled:
        shapes = ours.eval_shape(KEY)
    assert not compiled
    expected = jax.eval_shape(_network, KEY)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )


def test_results_share_no_memory_with_each_other_or_with_arguments():
    values = np.arange(64, dtype=np.float32)
    results = CompiledQuickly(lambda key, x: (key, key, x, x, _network(key)))(KEY, values)
    arrays = [x for x in jax.tree.leaves(results) if x.size]
    places = [x.unsafe_buffer_pointer() for x in arrays]
    assert len(set(places)) == len(places)
    values[:] = -1
    assert (np.asarray(results[2]) == np.arange(64)).all()
    changed = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)(results)
    np.testing.assert_array_equal(np.asarray(KEY), [0, 7])
    np.testing.assert_array_equal(changed[2], np.arange(64) * 2)


def test_arguments_of_other_shapes_are_traced_anew():
    ours = CompiledQuickly(jax.vmap(lambda key, x: jax.random.normal(key) + x))
    for number in 2, 3, 2:
        keys, x = jax.random.split(KEY, number), jnp.arange(number, dtype=jnp.float32)
        expected = LEVEL_1(jax.vmap(lambda key, x: jax.random.normal(key) + x))(keys, x)
        _same(ours(keys, x), expected)
    assert len(ours._parts) == 2
