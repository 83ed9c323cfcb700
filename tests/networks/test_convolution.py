"""Convolutions in every form equal those of Haiku, and the form follows platform and place."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.networks import ImpalaTorso, NatureTorso, feed_forward, in_parts
from rlstack.networks.base import dummy_timestep
from rlstack.networks.layers import convolution, forms
from tests.agent_cases import IMAGE, quick_jit

KEY = jax.random.PRNGKey(3)
SIDES = st.integers(1, 9)
OLDER = jax.__version_info__ < (0, 6)
FORMS = ("plain", "folded", "products")
PAIRS = st.tuples(st.integers(1, 5), st.integers(1, 5))


def results(make, shape, stride, padding, x):
    """Initial params, and values and gradients with a bias that is not zero."""
    function = hk.without_apply_rng(
        hk.transform(lambda x: make(3, shape, stride, padding=padding)(x))
    )

    def loss(params, x):
        y = function.apply(params, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape))).sum(), y

    def run(key, x):
        params = function.init(key, x)
        biased = {"conv2_d": {"w": params["conv2_d"]["w"], "b": jnp.arange(3.0)}}
        return params, jax.value_and_grad(loss, (0, 1), has_aux=True)(biased, x)

    return jax.device_get(quick_jit(run)(KEY, x))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif(
    OLDER, reason="the older CPU runtime of JAX 0.5 writes outside of its memory in convolutions"
)
@settings(max_examples=4, deadline=None)
@given(
    size=st.tuples(SIDES, SIDES),
    kernel=PAIRS,
    stride=PAIRS,
    padding=st.sampled_from(["VALID", "SAME"]),
)
def test_each_form_equals_haiku(size, kernel, stride, padding):
    size = tuple(max(pair) for pair in zip(size, kernel, strict=True))  # at least one result
    x = np.random.default_rng(0).normal(size=(2, *size, 2)).astype(np.float32)
    params, expected = results(hk.Conv2D, kernel, stride, padding, x)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-3)
    for form in FORMS:
        with forms.form(form):
            our_params, found = results(convolution.Conv2D, kernel, stride, padding, x)
        jax.tree.map(np.testing.assert_array_equal, our_params, params)
        jax.tree.map(close, found, expected)


@pytest.mark.parametrize("torso", [NatureTorso, ImpalaTorso])
def test_the_params_of_a_torso_are_those_of_haiku(torso, monkeypatch):
    function = hk.transform(lambda x: torso(hidden_size=4)(x))
    init = functools.partial(jax.eval_shape, function.init, KEY, jnp.zeros((2, 36, 37, 2)))
    found = init()
    monkeypatch.setattr("rlstack.networks.torsos.Conv2D", hk.Conv2D)
    assert found == init() and any("conv2_d" in name for name in found)


def traced(kernel=(4, 4), stride=(2, 2), x=(1, 8, 8, 2)):
    """The primitives of one convolution."""
    w = jnp.zeros((*kernel, x[-1], 3))
    found = jax.make_jaxpr(lambda x: convolution.convolve(x, w, stride, "VALID"))(jnp.zeros(x))
    return {str(equation.primitive) for equation in found.eqns}


def test_the_form_follows_platform_and_place(monkeypatch):
    monkeypatch.setattr(forms, "_platform", lambda: "cpu")
    monkeypatch.setattr(forms, "_PLAIN_ONLY", False)
    assert any("custom_vjp" in primitive for primitive in traced())  # folded
    assert traced((3, 3), (1, 1)) == {"conv_general_dilated"}
    assert traced((3, 3), (2, 2)) == {"conv_general_dilated"}  # no multiple of the stride
    with forms.in_loop():
        assert "dot_general" in traced()
        assert "dot_general" in traced((3, 3), (2, 2))
        monkeypatch.setattr(forms, "_platform", lambda: "gpu")
        assert traced() == {"conv_general_dilated"}


@pytest.mark.parametrize(("kernel", "is_product"), [((4, 4), True), ((6, 6), False)])
def test_the_gradient_of_a_small_kernel_is_a_product(kernel, is_product):
    x, w = jnp.zeros((2, 12, 12, 2)), jnp.zeros((*kernel, 2, 3))

    def loss(w):
        return convolution.convolve(x, w, (2, 2), "VALID").sum()

    with forms.form("folded"):
        found = str(jax.make_jaxpr(jax.grad(loss))(w))
    assert ("dot_general" in found) == is_product


@pytest.mark.skipif(not OLDER, reason="JAX 0.5 only")
def test_with_the_older_jax_convolutions_are_those_of_xla():
    with forms.in_loop():
        assert traced() == {"conv_general_dilated"}
    assert traced() == {"conv_general_dilated"}


def test_a_network_in_parts_convolves_in_a_loop(monkeypatch):
    monkeypatch.setattr(forms, "_platform", lambda: "cpu")
    monkeypatch.setattr(forms, "_PLAIN_ONLY", False)

    def forward(x):
        return convolution.Conv2D(2, 3)(x.astype(jnp.float32)).mean((1, 2, 3))

    network = in_parts(feed_forward(forward, IMAGE), 2)
    timestep = dummy_timestep(IMAGE, batch_size=4)
    params = jax.eval_shape(network.init, KEY)
    found = jax.make_jaxpr(lambda params: network.apply(None, params, timestep, ()))(params)
    assert "conv_general_dilated" not in str(found)
    assert "dot_general" in str(found)


def test_images_have_four_axes():
    with pytest.raises(ValueError, match=r"Conv2D: images must have the axes .*got \(8, 8, 2\)"):
        results(convolution.Conv2D, 3, 1, "SAME", np.zeros((8, 8, 2), np.float32))
