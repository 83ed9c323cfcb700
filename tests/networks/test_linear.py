"""Dense layers: their gradients equal those of hk.Linear in each form."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.networks.layers import forms
from rlstack.networks.layers.linear import Linear
from rlstack.networks.layers.products import multiply

own_forms = pytest.mark.skipif(forms.plain_only(), reason="JAX 0.5 has the plain form only")


def _of(layer, size, x):
    made = hk.without_apply_rng(hk.transform(lambda x: layer(size)(x)))
    params = made.init(jax.random.PRNGKey(0), x)
    return params, made.apply


@own_forms
@pytest.mark.parametrize(
    "size",
    [
        1,
        *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.chosen]) for n in (2, 8, 20, 64)),
        100,
    ],
)
@pytest.mark.parametrize("shape", [(256, 64), (3, 100, 64)])
def test_gradients_equal_those_of_haikus_layer(size, shape):
    x = jax.random.normal(jax.random.PRNGKey(1), shape)
    params, ours = _of(Linear, size, x)
    same, theirs = _of(hk.Linear, size, x)
    jax.tree.map(np.testing.assert_array_equal, params, same)  # names, shapes, initial values

    def loss(apply):
        return lambda params, x: jnp.sum(jnp.sin(apply(params, x)))

    np.testing.assert_array_equal(ours(params, x), theirs(params, x))
    found = jax.grad(loss(ours), argnums=(0, 1))(params, x)
    wanted = jax.grad(loss(theirs), argnums=(0, 1))(params, x)
    close = {"rtol": 2e-5, "atol": 2e-5}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found, wanted)


@pytest.mark.parametrize(
    "options", [{"with_bias": False}, {"b_init": hk.initializers.RandomUniform(-0.5, 0.5)}]
)
def test_biases_are_those_of_haikus_layer(options):
    x = jax.random.normal(jax.random.PRNGKey(1), (5, 7))
    w_init = hk.initializers.RandomUniform(-0.3, 0.3)
    params, ours = _of(lambda size: Linear(size, w_init, **options), 20, x)
    same, theirs = _of(lambda size: hk.Linear(size, w_init=w_init, name="linear", **options), 20, x)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    np.testing.assert_allclose(ours(params, x), theirs(params, x), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
@own_forms
@pytest.mark.parametrize("size", [2, 20, 64])
def test_gradients_under_vmap_and_of_gradients(size):
    x = jax.random.normal(jax.random.PRNGKey(1), (256, 64))
    params, ours = _of(Linear, size, x)
    _, theirs = _of(hk.Linear, size, x)
    several = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), params)

    def penalty(apply):  # of the gradient of the inputs, as in critics with a gradient penalty
        def of_inputs(params):
            return jax.grad(lambda x: jnp.sum(jnp.sin(apply(params, x))))(x)

        return jax.vmap(jax.grad(lambda params: jnp.sum(of_inputs(params) ** 2)))

    found, wanted = penalty(ours)(several), penalty(theirs)(several)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, wanted)


@pytest.mark.parametrize(
    ("rows", "inputs", "size", "form"),
    [
        (256, 64, 2, "_by_output"),
        (100, 64, 2, "_copied_outputs"),  # too small for the form by output
        (256, 64, 9, "_copied_outputs"),
        (256, 64, 64, "_copied_inputs"),
        (1024, 64, 64, "_copied_inputs"),
        (1024, 512, 64, "_copied_outputs"),
        (256, 96, 64, "_copied_outputs"),
        (2048, 64, 32, "_copied_outputs"),
        (32, 1024, 128, "_copied_inputs"),  # the result is larger than the inputs
        (2048, 1024, 128, "_copied_outputs"),
        (256, 3, 64, "_copied_inputs"),
    ],
)
@own_forms
def test_the_form_depends_on_the_shapes(rows, inputs, size, form):
    x = jnp.ones((rows, inputs))
    params, apply = _of(Linear, size, x)
    assert _form(apply, params, x) == form


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize(
    ("name", "value"), [("_platform", lambda: "gpu"), ("_PLAIN_ONLY", True)], ids=["gpu", "old JAX"]
)
def test_accelerators_and_jax_0_5_have_the_plain_form(monkeypatch, name, value, size):
    monkeypatch.setattr(forms, name, value)
    x = jnp.ones((256, 64))
    params, apply = _of(Linear, size, x)
    assert not _form(apply, params, x)


@own_forms
def test_the_plain_form_has_forward_mode_derivatives():
    x = jnp.ones((256, 64))
    params, apply = _of(Linear, 2, x)

    def loss(params):
        return jnp.sum(jnp.sin(apply(params, x)))

    # A product of the Hessian and a vector differentiates the gradient, which any form has.
    found = jax.jvp(jax.grad(loss), (params,), (params,))[1]
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (params,), (params,))
    with forms.form("plain"):
        assert np.isfinite(jax.jvp(loss, (params,), (params,))[1])
        wanted = jax.jvp(jax.grad(loss), (params,), (params,))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted)


def _form(apply, params, x):
    """Returns the name of the function with the layer's own gradients, or an empty string."""
    names = "_by_output", "_copied_inputs", "_copied_outputs"
    text = str(jax.make_jaxpr(apply)(params, x))
    return next((name for name in names if f"{name}\n" in text), "")


@own_forms
def test_a_batch_of_any_size_is_one_product_as_converters_know_it():
    (rows,) = jax.export.symbolic_shape("batch")
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 64), (64, 2)))
    jaxpr = jax.make_jaxpr(multiply)(x, w)
    assert jaxpr.out_avals[0].shape == (rows, 2)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["dot_general"]
