"""rlstack.distributions against enumeration, scipy and Monte Carlo; masks and specs."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack import distributions as dist

KEY = jax.random.PRNGKey(0)
ACTION_SPEC = {
    "choice": specs.DiscreteArray(3),
    "pair": (
        specs.BoundedArray((2,), np.int64, [1, -2], [4, -1]),
        specs.BoundedArray((2,), np.float32, [-2.0, 0.0], [3.0, 1.0]),
    ),
}


def normal_numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def example(kind, seed=0):
    """A distribution of the given kind with 4 rows."""
    x = normal_numbers(4, 13, seed=seed)
    mask = np.array([[1, 1, 0, 1, 1]] * 4)
    bounds = jnp.broadcast_to(jnp.array([-2.0, 0.0]), (4, 2)), jnp.ones((4, 2)) * 3
    return {
        "categorical": lambda: dist.categorical(x[:, :5], mask),
        "multi": lambda: dist.multi_categorical(x[:, :5], [3, 2], np.array([1, -2]), mask),
        "normal": lambda: dist.Normal(x[:, :2], 0.3 * x[:, 2:4]),
        "tanh": lambda: dist.TanhNormal(x[:, :2], 0.3 * x[:, 2:4], *bounds),
        "joint": lambda: dist.from_parameters(
            ACTION_SPEC, x[:, : dist.num_parameters(ACTION_SPEC)], squash=True
        ),
    }[kind]()


every_kind = pytest.mark.parametrize("kind", ["categorical", "multi", "normal", "tanh", "joint"])


def results(distribution, other, key):
    action, log_prob = distribution.sample_and_log_prob(key)
    return {
        "action": action,
        "sample_log_prob": log_prob,
        "sample": distribution.sample(key),
        "log_prob": distribution.log_prob(action),
        "entropy": distribution.entropy(),
        "kl": distribution.kl(other),
        "mode": distribution.mode(),
    }


@pytest.mark.slow
@pytest.mark.chosen
@every_kind
def test_jit_equals_no_jit_with_shapes_and_dtypes(kind):
    distribution, other = example(kind), example(kind, seed=1)
    assert jax.tree.structure(distribution) == jax.tree.structure(other)
    plain = results(distribution, other, KEY)
    jitted = jax.jit(results)(distribution, other, KEY)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        assert a.dtype == b.dtype and a.dtype in (np.int32, np.float32)
    for name in ("sample_log_prob", "log_prob", "entropy", "kl"):
        assert plain[name].shape == (4,) and plain[name].dtype == np.float32
    np.testing.assert_allclose(plain["log_prob"], plain["sample_log_prob"], rtol=1e-3, atol=1e-3)
    assert np.all(plain["kl"] > 0)
    np.testing.assert_allclose(distribution.kl(distribution), 0.0, atol=1e-6)


@every_kind
def test_a_slice_of_the_leaves_is_a_slice_of_the_distribution(kind):
    distribution, other = example(kind), example(kind, seed=1)
    action = distribution.mode()
    part, other_part, action_part = jax.tree.map(lambda x: x[1:3], (distribution, other, action))
    np.testing.assert_allclose(part.entropy(), distribution.entropy()[1:3], rtol=1e-5)
    np.testing.assert_allclose(part.kl(other_part), distribution.kl(other)[1:3], rtol=1e-4)
    np.testing.assert_allclose(
        part.log_prob(action_part), distribution.log_prob(action)[1:3], rtol=1e-5
    )
    again = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, distribution)))
    np.testing.assert_allclose(again.entropy(), distribution.entropy(), rtol=1e-6)


@every_kind
def test_gradients_are_finite(kind):
    action = example(kind).sample(KEY)
    other = example(kind, seed=1)

    def total(distribution):
        terms = distribution.log_prob(action), distribution.entropy(), distribution.kl(other)
        return sum(jnp.sum(x) for x in terms)

    gradient = jax.jit(jax.grad(total, allow_int=True))(example(kind))
    floats = [x for x in jax.tree.leaves(gradient) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floats and all(np.all(np.isfinite(x)) for x in floats)
    assert any(np.any(x != 0) for x in floats)


@pytest.mark.slow
@pytest.mark.chosen
@every_kind
def test_entropy_and_kl_are_expectations_of_log_prob(kind):
    distribution, other = example(kind), example(kind, seed=1)
    many = 20_000
    wide, wide_other = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (many, *x.shape)), (distribution, other)
    )
    action, log_prob = wide.sample_and_log_prob(KEY)
    error = 5 * np.std(log_prob, axis=0) / np.sqrt(many)
    assert np.all(np.abs(-np.mean(log_prob, axis=0) - distribution.entropy()) < error)
    if kind in ("tanh", "joint"):  # log_prob of saturated actions is cut by float32
        return
    ratio = np.asarray(log_prob - wide_other.log_prob(action))
    error = 5 * np.std(ratio, axis=0) / np.sqrt(many)
    assert np.all(np.abs(np.mean(ratio, axis=0) - distribution.kl(other)) < error + 1e-6)


def test_categorical_by_enumeration_with_mask():
    logits = np.array([0.5, -1.0, 2.0, 0.0])
    legal = np.array([True, True, False, True])
    p = np.exp(logits) * legal
    p /= p.sum()
    got = dist.categorical(logits, legal)
    np.testing.assert_allclose(got.probs(), p, rtol=1e-6)
    assert got.probs()[2] == 0.0
    np.testing.assert_array_equal(got.legal(), legal)
    for action in np.flatnonzero(legal):
        np.testing.assert_allclose(got.log_prob(action), np.log(p[action]), rtol=1e-5)
    assert got.log_prob(2) < -1e8 and np.isfinite(got.log_prob(2))
    q = np.array([0.2, 0.3, 0.0, 0.5])
    np.testing.assert_allclose(got.entropy(), -np.sum(p[legal] * np.log(p[legal])), rtol=1e-6)
    other = dist.categorical(np.log(np.maximum(q, 1e-30)), legal)
    want = np.sum(p[legal] * np.log(p[legal] / q[legal]))
    np.testing.assert_allclose(got.kl(other), want, rtol=1e-5)
    assert got.mode() == 0 and got.mode().dtype == np.int32
    # The KL to a distribution that forbids an action is very large, but finite.
    assert 1e7 < got.kl(dist.categorical(logits, [True, False, False, True])) < np.inf


@pytest.mark.slow
@pytest.mark.chosen
def test_masked_gradient_equals_that_of_the_smaller_distribution():
    small = jnp.array([0.5, -1.0, 0.3])
    other = dist.categorical(jnp.array([0.0, 1.0, 0.0, -1.0]), jnp.array([1, 1, 0, 1]))

    def terms(d, action, other):
        return d.log_prob(action) + 2 * d.entropy() + 3 * d.kl(other) + other.kl(d)

    def masked(x):
        logits = jnp.array([x[0], x[1], 9.0, x[2]])
        return terms(dist.categorical(logits, jnp.array([1, 1, 0, 1])), 3, other)

    def alone(x):
        return terms(dist.categorical(x), 2, dist.categorical(jnp.array([0.0, 1.0, -1.0])))

    np.testing.assert_allclose(masked(small), alone(small), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(masked)(small), jax.grad(alone)(small), rtol=1e-5)
    in_logits = jax.grad(lambda x: terms(dist.categorical(x, jnp.array([1, 1, 0, 1])), 3, other))(
        jnp.zeros(4)
    )
    assert in_logits[2] == 0.0


def test_a_row_without_legal_actions_counts_as_all_legal_and_minus_inf_as_illegal():
    got = dist.categorical(np.zeros((2, 3)), np.array([[0, 0, 0], [0, 1, 1]], bool))
    np.testing.assert_allclose(got.entropy(), np.log([3, 2]), rtol=1e-6)
    got = dist.categorical(np.array([0.0, -np.inf, 0.0]))
    np.testing.assert_allclose(got.entropy(), np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(got.legal(), [True, False, True])


def test_multi_categorical_by_enumeration():
    logits = np.array([0.1, 1.0, -0.5, 0.3, 0.7])
    got = dist.multi_categorical(logits, [3, 2], np.array([1, -2]))
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits[:3], logits[3:]))
    total = 0.0
    for i in range(3):
        for j in range(2):
            log_prob = got.log_prob(np.array([1 + i, -2 + j]))
            np.testing.assert_allclose(log_prob, np.log(p[i] * q[j]), rtol=1e-5)
            total += np.exp(log_prob)
    np.testing.assert_allclose(total, 1.0, rtol=1e-6)
    want = -np.sum(p * np.log(p)) - np.sum(q * np.log(q))
    np.testing.assert_allclose(got.entropy(), want, rtol=1e-6)
    np.testing.assert_array_equal(got.mode(), [2, -1])


def chi_square(counts, probs):
    """Pearson's statistic over the possible outcomes; impossible ones must not occur."""
    assert np.all(counts[probs == 0] == 0)
    counts, expected = counts[probs > 0], counts.sum() * probs[probs > 0]
    return np.sum((counts - expected) ** 2 / expected)


def test_sampling_frequencies():
    d = dist.categorical(np.array([0.5, -1.0, 2.0, 0.0]), np.array([1, 1, 0, 1]))
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (20_000, *x.shape)), d)
    counts = np.bincount(wide.sample(KEY), minlength=4)
    assert chi_square(counts, np.asarray(d.probs())) < 13.8  # 0.1% point, 2 degrees of freedom

    d = dist.multi_categorical(np.array([0.1, 1.0, -0.5, 0.3, 0.7]), [3, 2], np.array([1, -2]))
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (20_000, *x.shape)), d)
    actions = np.asarray(wide.sample(KEY)) - np.array([1, -2])
    counts = np.bincount(actions @ np.array([2, 1]), minlength=6)
    p = np.asarray(d.categorical().probs())
    joint = np.outer(p[0], p[1, :2]).ravel()
    assert chi_square(counts, joint) < 20.5  # 0.1% point, 5 degrees of freedom


def test_tanh_normal_density_integrates_to_one_and_is_finite_at_the_bounds():
    low, high = -1.0, 5.0
    d = dist.TanhNormal(*(jnp.array([x]) for x in (0.4, -0.5, low, high)))
    grid = np.linspace(low, high, 20_001)[1:-1, None]
    log_density = jax.vmap(d.log_prob)(jnp.asarray(grid, jnp.float32))
    step = (high - low) / 20_000
    np.testing.assert_allclose(np.sum(np.exp(log_density)) * step, 1.0, rtol=1e-4)
    entropy = -np.sum(np.exp(log_density) * log_density) * step
    np.testing.assert_allclose(d.entropy(), entropy, rtol=1e-4)
    for action in (low, high, low - 1, high + 1):
        value, gradient = jax.value_and_grad(lambda m: d._replace(mean=m).log_prob(action))(d.mean)  # noqa: B023
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_tanh_normal_stays_inside_and_saturates_finitely():
    shape = (1000, 1)
    low, high = jnp.full(shape, -0.1), jnp.full(shape, 0.3)
    d = dist.TanhNormal(jnp.full(shape, 20.0), jnp.full(shape, 2.0), low, high)
    action, log_prob = d.sample_and_log_prob(KEY)
    assert np.all(action >= low) and np.all(action <= high)
    assert np.all(np.isfinite(log_prob)) and np.all(np.isfinite(d.log_prob(action)))
    # The slope of tanh at 20 is 4 e^-40; the density before tanh is divided by it, no underflow.
    narrow = dist.TanhNormal(*(jnp.array([x]) for x in (20.0, -10.0, -1.0, 1.0)))
    _, log_prob = narrow.sample_and_log_prob(KEY)
    z = jax.random.normal(KEY, (1,))[0]
    want = -0.5 * z**2 - 0.5 * np.log(2 * np.pi) + 10.0 - (2 * np.log(2.0) - 40.0)
    np.testing.assert_allclose(log_prob, want, rtol=1e-3)


@pytest.mark.parametrize("log_std", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("mean", [0.0, 1.5, -6.0])
def test_tanh_normal_entropy_against_many_samples(mean, log_std):
    shape = (100_000, 1)
    fields = (jnp.full(shape, x) for x in (mean, log_std, -2.0, 2.0))
    d = dist.TanhNormal(*fields)
    _, log_prob = d.sample_and_log_prob(KEY)
    error = 5 * np.std(log_prob) / np.sqrt(shape[0]) + 0.02  # quadrature error, worst at std 7
    assert abs(-np.mean(log_prob) - d.entropy()[0]) < error


def test_samples_are_reparameterised():
    def action(mean, log_std):
        one = jnp.ones(1)
        normal = dist.Normal(mean * one, log_std * one).sample(KEY)[0]
        bounded, _ = dist.TanhNormal(mean * one, log_std * one, -one, one).sample_and_log_prob(KEY)
        return normal, bounded[0]

    by_mean = jax.jacobian(action)(0.3, -0.2)
    np.testing.assert_allclose(by_mean[0], 1.0, rtol=1e-6)
    bounded = action(0.3, -0.2)[1]
    np.testing.assert_allclose(by_mean[1], 1 - bounded**2, rtol=1e-4)


def test_deterministic():
    d = dist.Deterministic(jnp.array([[0.5, 1.0]]))
    np.testing.assert_array_equal(d.sample(KEY), d.mode())
    for call in (
        lambda: d.log_prob(d.mode()),
        d.entropy,
        lambda: d.kl(d),
        lambda: d.sample_and_log_prob(KEY),
    ):
        with pytest.raises(TypeError, match="a single action has none"):
            call()


def test_joint_sums_over_its_components_and_draws_them_independently():
    components = {"a": example("categorical"), "b": (example("normal"), example("multi"))}
    d = dist.Joint(components)
    action = d.sample(KEY)
    assert set(action) == {"a", "b"} and action["b"][1].shape == (4, 2)
    parts = [components["a"], *components["b"]]
    actions = [action["a"], *action["b"]]
    want = sum(p.log_prob(x) for p, x in zip(parts, actions, strict=True))
    np.testing.assert_allclose(d.log_prob(action), want, rtol=1e-5)
    np.testing.assert_allclose(d.entropy(), sum(p.entropy() for p in parts), rtol=1e-5)
    wide = dist.categorical(jnp.zeros((1000, 2)))
    twins = dist.Joint((wide, wide)).sample(KEY)
    assert 400 < np.sum(twins[0] == twins[1]) < 600


@pytest.mark.slow
@pytest.mark.chosen
def test_from_parameters_builds_what_the_spec_asks_for():
    n = dist.num_parameters(ACTION_SPEC)
    assert n == 3 + (4 + 2) + 2 * 2
    parameters = normal_numbers(5, n)
    masks = {
        "choice": np.array([[0, 1, 1]] * 5),
        "pair": (np.array([[1, 0, 0, 0, 1, 1]] * 5), None),
    }
    d = dist.from_parameters(ACTION_SPEC, parameters, masks, squash=True)
    choice, (multi, bounded) = d.components["choice"], d.components["pair"]
    np.testing.assert_array_equal(choice.logits[:, 1:], parameters[:, 1:3])
    np.testing.assert_array_equal(multi.logits[:, 1, :2], parameters[:, 7:9])
    np.testing.assert_array_equal(bounded.mean, parameters[:, 9:11])
    np.testing.assert_array_equal(bounded.log_std, parameters[:, 11:])
    for seed in range(20):
        action = d.sample(jax.random.PRNGKey(seed))
        assert np.all(action["choice"] > 0)
        assert np.all(action["pair"][0][:, 0] == 1)
        assert np.all(np.isin(action["pair"][0][:, 1], [-2, -1]))
        jax.tree.map(
            lambda spec, x: [spec.validate(np.asarray(row, spec.dtype)) for row in x],
            ACTION_SPEC,
            action,
        )
    plain = dist.from_parameters(ACTION_SPEC["pair"][1], parameters[:, :4])
    assert isinstance(plain, dist.Normal) and plain.mean.shape == (5, 2)
    assert isinstance(
        dist.from_parameters(specs.BoundedArray((), np.int32, 0, 2), parameters[:, :3]),
        dist.Categorical,
    )
    unrolled = dist.from_parameters(ACTION_SPEC, normal_numbers(2, 3, n), squash=True)
    assert unrolled.entropy().shape == (2, 3)
    clipped = dist.from_parameters(ACTION_SPEC["pair"][1], jnp.full((1, 4), 50.0), squash=True)
    np.testing.assert_array_equal(clipped.log_std, 2.0)


@pytest.mark.parametrize(
    "spec, message",
    [
        (specs.Array((2,), np.int32), "must be a DiscreteArray, or a BoundedArray"),
        (specs.BoundedArray((2, 2), np.int32, 0, 1), "rank 0 or 1"),
        (specs.BoundedArray((), np.int32, 1, 3), "minimum of a scalar integer action must be 0"),
        (specs.Array((2, 2), np.float32), "rank 1"),
        (specs.Array((), np.float32), "rank 1"),
        ({"a": 3}, "pytree of dm_env specs"),
    ],
)
def test_specs_without_a_distribution_raise(spec, message):
    with pytest.raises(ValueError, match=message):
        dist.num_parameters(spec)


def test_from_parameters_misuse_raises():
    discrete, real = specs.DiscreteArray(3), specs.Array((2,), np.float32)
    with pytest.raises(ValueError, match=r"needs parameters \[..., 3\]; got shape \(2, 4\)"):
        dist.from_parameters(discrete, np.zeros((2, 4)))
    with pytest.raises(ValueError, match="only discrete actions take a mask"):
        dist.from_parameters(real, np.zeros((2, 4)), np.ones((2, 2)))
    with pytest.raises(ValueError, match="squash needs finite bounds"):
        dist.from_parameters(real, np.zeros((2, 4)), squash=True)


def test_masks_may_have_an_axis_of_choices_of_the_same_size():
    spec = specs.BoundedArray((2,), np.int32, 0, 2)
    logits = jnp.arange(12.0).reshape(2, 6)
    mask = np.array([[[1, 1, 0], [1, 0, 0]], [[1, 0, 1], [1, 1, 0]]])
    found = dist.from_parameters(spec, logits, mask)
    assert found.mode().tolist() == [[1, 0], [2, 1]]
    flat = dist.from_parameters(spec, logits, mask.reshape(2, 6))
    np.testing.assert_array_equal(found.logits, flat.logits)


@pytest.mark.parametrize("shape", [(8, 1, 4), (1, 8, 4), (1, 4), (8, 1), (8, 3), (4,), (8,), ()])
def test_masks_of_other_shapes_than_the_logits_are_refused(shape):
    """By broadcasting, one entry would make all actions legal or none, and an axis more a batch."""
    logits, mask = jnp.zeros((8, 4)), jnp.ones(shape, bool)
    pair = specs.BoundedArray((2,), np.int32, [0, 0], [2, 0])
    came = re.escape(f"(8, 4), one entry for each choice; got {shape}. Declare")
    for make in (
        lambda: dist.categorical(logits, mask),
        lambda: dist.multi_categorical(logits, [3, 1], None, mask),
        lambda: dist.from_parameters(specs.DiscreteArray(4), logits, mask),
        lambda: dist.from_parameters(pair, logits, mask),
        lambda: dist.from_parameters({"a": pair}, logits, {"a": mask}),
    ):
        with pytest.raises(ValueError, match=came):
            make()


@pytest.mark.launchpad
def test_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    d = example("normal")
    mean, std = np.asarray(d.mean, np.float64), np.exp(np.asarray(d.log_std, np.float64))
    action = np.asarray(d.sample(KEY))
    np.testing.assert_allclose(
        d.log_prob(action), stats.norm.logpdf(action, mean, std).sum(-1), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(d.entropy(), stats.norm.entropy(mean, std).sum(-1), rtol=1e-5)
    wide = jax.tree.map(lambda x: jnp.broadcast_to(x[0, 0], (5000, 1)), d)
    sample = np.asarray(wide.sample(KEY))[:, 0]
    assert stats.kstest(sample, "norm", (mean[0, 0], std[0, 0])).pvalue > 1e-3
    c = example("categorical")
    np.testing.assert_allclose(
        c.entropy(), stats.entropy(np.asarray(c.probs()), axis=-1), rtol=1e-5
    )
    np.testing.assert_allclose(
        c.kl(example("categorical", 1)),
        np.nansum(
            np.where(
                c.legal(),
                np.asarray(c.probs())
                * np.log(
                    np.where(c.legal(), c.probs(), 1)
                    / np.where(c.legal(), example("categorical", 1).probs(), 1)
                ),
                0,
            ),
            axis=-1,
        ),
        rtol=1e-4,
    )
