"""Projections and quantile losses: by hand, in slow plain Python, and against rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.math.value_distributions import categorical_kl, midpoints, project, quantile_huber_loss

ATOMS = np.array([-1.0, 0.0, 1.0], np.float32)


def test_a_projection_by_hand():
    values = np.array([[0.25, 0.0, 7.0], [-9.0, -0.5, 1.0]], np.float32)
    probs = np.array([[0.4, 0.5, 0.1], [0.2, 0.6, 0.2]], np.float32)
    # 0.25 gives 3/4 to atom 0 and 1/4 to atom 1; 7 counts as 1, -9 as -1; -0.5 is halved.
    expected = [[0.0, 0.3 + 0.5, 0.1 + 0.1], [0.2 + 0.3, 0.3, 0.2]]
    np.testing.assert_allclose(project(values, probs, ATOMS), expected, atol=1e-6)


def test_a_projection_keeps_probability_and_within_the_atoms_the_mean():
    rng = np.random.default_rng(0)
    atoms = np.linspace(-3, 5, 17, dtype=np.float32)
    values = rng.uniform(-3, 5, (4, 6)).astype(np.float32)
    probs = rng.dirichlet(np.ones(6), 4).astype(np.float32)
    found = np.asarray(project(values, probs, atoms))
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(found @ atoms, (values * probs).sum(-1), rtol=1e-4)


@pytest.mark.launchpad
def test_a_projection_is_that_of_rlax():
    rlax = pytest.importorskip("rlax")
    rng = np.random.default_rng(0)
    atoms = np.linspace(-2, 6, 9, dtype=np.float32)
    values = rng.normal(scale=5, size=(8, 9)).astype(np.float32)
    probs = rng.dirichlet(np.ones(9), 8).astype(np.float32)
    expected = jax.vmap(rlax.categorical_l2_project, (0, 0, None))(values, probs, jnp.array(atoms))
    np.testing.assert_allclose(project(values, probs, atoms), expected, atol=1e-5)


def test_the_divergence_by_hand_and_its_gradient_is_the_cross_entropys():
    target = np.array([0.5, 0.5, 0.0], np.float32)
    logits = np.log(np.array([0.25, 0.5, 0.25], np.float32))
    assert categorical_kl(target, logits) == pytest.approx(0.5 * np.log(2), rel=1e-5)
    assert categorical_kl(target, np.array([0.0, 0.0, -80.0])) == pytest.approx(0, abs=1e-6)
    gradient = jax.grad(categorical_kl, argnums=1)(target, logits)
    np.testing.assert_allclose(gradient, np.exp(logits) - target, atol=1e-6)


def slow_quantile_loss(quantiles, fractions, targets, delta):
    total = 0.0
    for quantile, fraction in zip(quantiles, fractions, strict=True):
        for target in targets:
            u = float(target - quantile)
            weight = abs(fraction - (1.0 if u < 0 else 0.0))
            if delta == 0:
                size = abs(u)
            elif abs(u) <= delta:
                size = 0.5 * u * u / delta
            else:
                size = abs(u) - 0.5 * delta
            total += weight * size / len(targets)
    return total


@pytest.mark.parametrize("delta", [0.0, 0.5, 1.0])
def test_quantile_losses_of_any_fractions(delta):
    rng = np.random.default_rng(1)
    quantiles, fractions = rng.normal(size=(5, 3)), rng.uniform(size=(5, 3))
    targets = rng.normal(size=(5, 4))
    found = quantile_huber_loss(quantiles, fractions, targets, delta)
    rows = zip(quantiles, fractions, targets, strict=True)
    expected = [slow_quantile_loss(*row, delta) for row in rows]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_quantile_loss_by_hand():
    # u = 3 above and -0.5 below: 0.25 * (3 - 0.5) and 0.75 * 0.125, of two targets.
    loss = quantile_huber_loss(np.array([1.0]), np.array([0.25]), np.array([4.0, 0.5]), 1.0)
    assert loss == pytest.approx((0.25 * 2.5 + 0.75 * 0.125) / 2)


@pytest.mark.launchpad
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_quantile_losses_are_those_of_rlax(delta):
    rlax = pytest.importorskip("rlax")
    rng = np.random.default_rng(2)
    quantiles, targets = (rng.normal(size=(6, 5)).astype(np.float32) for _ in range(2))
    fractions = np.tile(midpoints(5), (6, 1))
    expected = jax.vmap(lambda q, f, t: rlax.quantile_regression_loss(q, f, t, delta))(
        quantiles, fractions, targets
    )
    found = quantile_huber_loss(quantiles, fractions, targets, delta)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_minimum_has_the_quantiles_of_the_targets():
    targets = np.arange(100.0, dtype=np.float32)
    fractions = midpoints(4)
    np.testing.assert_allclose(fractions, [0.125, 0.375, 0.625, 0.875])
    gradient = jax.jit(jax.grad(lambda q: quantile_huber_loss(q, fractions, targets, 0.0)))
    quantiles = jnp.zeros(4)
    for _ in range(400):
        quantiles = quantiles - 2.0 * gradient(quantiles)
    np.testing.assert_allclose(quantiles, [12.5, 37.5, 62.5, 87.5], atol=2.0)


def test_gradients_do_not_pass_through_targets():
    ones = np.ones(3, np.float32)
    gradient = jax.grad(quantile_huber_loss, argnums=2)(ones, midpoints(3), 2 * ones, 1.0)
    assert np.all(gradient == 0)
