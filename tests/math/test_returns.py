"""Returns checked by hand, against slow equations, against rlax, and across boundaries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.math import returns

LAMBDA = 0.8
CLIPS = {"clip_rho": 0.9, "clip_c": 1.1, "clip_pg_rho": 1.3, "vtrace_lambda": LAMBDA}


# Every function as a jitted call from one dict of arrays to a dict of named results.
FUNCTIONS = {
    "gae": lambda d: returns.gae(d["rewards"], d["discounts"], d["values"], LAMBDA, d["mask"]),
    "vtrace": lambda d: returns.vtrace(
        d["log_rhos"], d["rewards"], d["discounts"], d["values"], d["mask"], **CLIPS
    ),
    "discounted_returns": lambda d: returns.discounted_returns(
        d["rewards"], d["discounts"], d["values"], d["mask"]
    ),
    "lambda_returns": lambda d: returns.lambda_returns(
        d["rewards"], d["discounts"], d["values"], LAMBDA, d["mask"]
    ),
    "n_step_returns_1": lambda d: returns.n_step_returns(
        d["rewards"], d["discounts"], d["values"], 1, d["mask"]
    ),
    "n_step_returns_3": lambda d: returns.n_step_returns(
        d["rewards"], d["discounts"], d["values"], 3, d["mask"]
    ),
    "retrace": lambda d: returns.retrace(
        d["log_rhos"],
        d["rewards"],
        d["discounts"],
        d["q_taken"],
        d["values"],
        LAMBDA,
        d["mask"],
    ),
}
JITTED = {name: jax.jit(function) for name, function in FUNCTIONS.items()}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def run(name, data):
    """The function's results as a list of arrays."""
    return [np.asarray(x) for x in jax.tree.leaves(JITTED[name](data))]


def random_data(seed, length, batch, discount=0.95):
    """An unroll with one episode per column."""
    rng = np.random.default_rng(seed)
    shape = (length, batch)
    return {
        "rewards": rng.normal(size=shape).astype(np.float32),
        "discounts": np.full(shape, discount, np.float32),
        "values": rng.normal(size=(length + 1, batch)).astype(np.float32),
        "q_taken": rng.normal(size=shape).astype(np.float32),
        "log_rhos": (0.7 * rng.normal(size=shape)).astype(np.float32),
        "mask": np.ones(shape, bool),
    }


def slow(name, d, column):
    """The equations in plain Python, by episode, for one column; results as in ``run``."""
    data = {key: [float(x) for x in array[:, column]] for key, array in d.items()}
    length = len(data["rewards"])
    results = None
    start = 0
    while start < length:
        end = start  # the episode has transitions start .. end - 1 and its last step is `end`
        while end < length and data["mask"][end]:
            end += 1
        rows = _slow_episode(name, data, start, end)
        if end < length:  # the masked transition
            here = data["q_taken"][end] if name == "retrace" else data["values"][end]
            cut = {"gae": (0.0, here), "vtrace": (here, 0.0)}.get(name, (here,))
            rows = [*rows, cut]
        results = rows if results is None else results + rows
        start = end + 1
    return np.array(results, np.float64).T


def _slow_episode(name, d, start, end):
    r, g, v = d["rewards"], d["discounts"], d["values"]
    rho = [np.exp(x) for x in d["log_rhos"]]
    td = [r[t] + g[t] * v[t + 1] - v[t] for t in range(end)]

    def n_step(t, n):
        stop, total, product = min(t + n, end), 0.0, 1.0
        for k in range(t, stop):
            total += product * r[k]
            product *= g[k]
        return total + product * v[stop]

    def vs(t):
        total, product = v[t], 1.0
        for k in range(t, end):
            total += product * min(CLIPS["clip_rho"], rho[k]) * td[k]
            product *= g[k] * LAMBDA * min(CLIPS["clip_c"], rho[k])
        return total

    rows = []
    for t in range(start, end):
        if name == "gae":
            weights = [np.prod([g[j] * LAMBDA for j in range(t, k)]) for k in range(t, end)]
            advantage = sum(w * td[k] for w, k in zip(weights, range(t, end), strict=True))
            rows.append((advantage, advantage + v[t]))
        elif name == "vtrace":
            q_next = LAMBDA * vs(t + 1) + (1 - LAMBDA) * v[t + 1] if t + 1 < end else v[end]
            rows.append((vs(t), min(CLIPS["clip_pg_rho"], rho[t]) * (r[t] + g[t] * q_next - v[t])))
        elif name == "discounted_returns":
            rows.append((n_step(t, end),))
        elif name.startswith("n_step"):
            rows.append((n_step(t, int(name[-1])),))
        elif name == "lambda_returns":  # the mixture of n-step returns, eq. 12.3
            horizon = end - t
            mixture = (1 - LAMBDA) * sum(
                LAMBDA ** (n - 1) * n_step(t, n) for n in range(1, horizon)
            )
            rows.append((mixture + LAMBDA ** (horizon - 1) * n_step(t, horizon),))
        else:  # retrace, eq. 3: Q + sum of traced TD errors
            total, product = d["q_taken"][t], 1.0
            for k in range(t, end):
                if k > t:
                    product *= g[k - 1] * LAMBDA * min(1.0, rho[k])
                total += product * (r[k] + g[k] * v[k + 1] - d["q_taken"][k])
            rows.append((total,))
    return rows


@every_function
@given(
    seed=st.integers(0, 2**31),
    length=st.sampled_from([1, 4, 11]),
    batch=st.just(3),
)
@settings(max_examples=15, deadline=None)
def test_equals_slow_version_of_the_equation(name, seed, length, batch):
    data = random_data(seed, length, batch)
    rng = np.random.default_rng(seed + 1)
    # Boundaries anywhere: some next to each other, some at the two ends of the unroll.
    data["mask"] = rng.random((length, batch)) > 0.25
    terminated = rng.random((length, batch)) < 0.5
    ends = np.roll(~data["mask"], -1, axis=0)
    data["discounts"] = np.where(ends & terminated, 0.0, data["discounts"]).astype(np.float32)
    got = run(name, data)
    for column in range(batch):
        want = slow(name, data, column)
        np.testing.assert_allclose([x[:, column] for x in got], want, rtol=2e-5, atol=2e-5)


@every_function
@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("as_float", [True, False])
def test_two_episodes_in_one_unroll_equal_each_alone(name, terminated, as_float):
    """Also tests the truncated bootstrap: alone, episode 1 ends with its last step's value."""
    first, second = random_data(1, 5, 2), random_data(2, 4, 2)
    if terminated:
        first["discounts"][-1] = 0.0
    # LAST -> FIRST: the values there are arbitrary and must not matter.
    gap = {
        key: np.full((1, 2), x, first[key].dtype)
        for key, x in {
            "rewards": 1e3,
            "discounts": 1.0,
            "log_rhos": 50.0,
            "q_taken": 7.0,
            "mask": False,
        }.items()
    }
    both = {key: np.concatenate([first[key], gap[key], second[key]]) for key in gap}
    both["values"] = np.concatenate([first["values"], second["values"]])
    if as_float:
        both["mask"] = both["mask"].astype(np.float32)
    together, alone = run(name, both), zip(run(name, first), run(name, second), strict=True)
    for joined, (one, two) in zip(together, alone, strict=True):
        np.testing.assert_allclose(joined[:5], one, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(joined[6:], two, atol=1e-5, rtol=1e-5)
    if terminated:
        return
    moved = {**both, "values": both["values"] + np.eye(11, dtype=np.float32)[5][:, None]}
    change = [b - a for a, b in zip(together, run(name, moved), strict=True)]
    # A value at the truncated LAST reaches its last transition by one discount and ratio.
    want = {"vtrace": None}.get(name, 0.95)
    if want is not None:
        np.testing.assert_allclose(change[0][4], want, rtol=1e-3)
    for x in change:
        assert np.all(x[4] != 0)
        np.testing.assert_allclose(x[6:], 0.0, atol=1e-6)


@every_function
def test_masked_entries_are_defined_and_ignore_inf(name):
    data = random_data(3, 4, 1)
    data["mask"][2] = False
    for key in ("rewards", "discounts", "log_rhos"):
        data[key][2] = np.inf
    got = run(name, data)
    for x in got:
        assert np.all(np.isfinite(x))
    at_mask = [x[2, 0] for x in got]
    value = data["q_taken"][2, 0] if name == "retrace" else data["values"][2, 0]
    want = {"gae": [0.0, value], "vtrace": [value, 0.0]}.get(name, [value])
    np.testing.assert_allclose(at_mask, want, atol=1e-6)


def test_gae_by_hand():
    data = random_data(0, 2, 1)
    data.update(
        rewards=np.array([[1.0], [2.0]]),
        discounts=np.array([[0.5], [0.5]]),
        values=np.array([[1.0], [3.0], [4.0]]),
    )
    # deltas: 1 + 1.5 - 1 = 1.5 and 2 + 2 - 3 = 1; A_0 = 1.5 + 0.5 * 0.8 * 1
    advantages, targets = run("gae", data)
    np.testing.assert_allclose(advantages[:, 0], [1.9, 1.0], rtol=1e-6)
    np.testing.assert_allclose(targets[:, 0], [2.9, 4.0], rtol=1e-6)


def test_plain_returns_by_hand():
    args = (
        np.array([[1.0], [2.0], [4.0]]),
        np.array([[0.5], [0.5], [0.5]]),
        np.array([[9.0], [10.0], [20.0], [8.0]]),
    )
    mask = np.ones((3, 1))
    # from the last step back: 4 + 4 = 8, 2 + 4 = 6, 1 + 3 = 4
    np.testing.assert_allclose(returns.discounted_returns(*args, mask)[:, 0], [4, 6, 8])
    # two steps: 1 + 1 + 20/4 = 7, 2 + 2 + 8/4 = 6, and only one left: 4 + 4
    np.testing.assert_allclose(returns.n_step_returns(*args, 2, mask)[:, 0], [7, 6, 8])
    # lambda 1/2: 8; 2 + 0.5 (10 + 4) = 9; 1 + 0.5 (5 + 4.5) = 5.75
    np.testing.assert_allclose(returns.lambda_returns(*args, 0.5, mask)[:, 0], [5.75, 9, 8])


def test_off_policy_by_hand():
    rewards = np.array([[1.0], [2.0]])
    discounts = np.array([[0.5], [0.5]])
    values = np.array([[1.0], [3.0], [4.0]])
    log_rhos = np.log([[2.0], [0.5]])
    mask = np.ones((2, 1))
    # deltas 1.5 and 1, rhos min(1, .) = 1 and 0.5: vs_1 = 3 + 0.5; vs_0 = 1 + 1.5 + 0.5 * 0.5
    vs, pg_advantages = returns.vtrace(log_rhos, rewards, discounts, values, mask, clip_pg_rho=3.0)
    np.testing.assert_allclose(vs[:, 0], [2.75, 3.5], rtol=1e-6)
    # 2 * (1 + 0.5 * 3.5 - 1) and 0.5 * (2 + 2 - 3)
    np.testing.assert_allclose(pg_advantages[:, 0], [3.5, 0.5], rtol=1e-6)
    # Q = 2, 1: Q^ret_1 = 2 + 2 = 4; Q^ret_0 = 1 + 0.5 (3 + 0.5 (4 - 1)) = 3.25
    q_taken = np.array([[2.0], [1.0]])
    got = returns.retrace(log_rhos, rewards, discounts, q_taken, values, 1.0, mask)
    np.testing.assert_allclose(got[:, 0], [3.25, 4.0], rtol=1e-6)


def test_style_guide_case_of_a_leaking_trace():
    """Returns before a truncation inside an unroll must not include the huge reward after it."""
    rewards = np.array([[1.0], [1.0], [0.0], [60.0]])
    values = np.array([[1.0], [1.0], [1.0], [5.0], [5.0]])
    discounts = np.full((4, 1), 0.9)
    mask = np.array([[1], [1], [0], [1]])
    got = returns.vtrace(np.zeros((4, 1)), rewards, discounts, values, mask)
    # 1 + 0.9 * 1 = 1.9 and 1 + 0.9 * 1.9 = 2.71
    np.testing.assert_allclose(got.vs[:2, 0], [2.71, 1.9], rtol=1e-6)


def test_on_policy_vtrace_advantages_are_gae_and_lambda_one_is_the_return():
    data = random_data(4, 7, 2)
    data["log_rhos"][:] = 0.0
    args = (data["rewards"], data["discounts"], data["values"])
    got = returns.vtrace(data["log_rhos"], *args, data["mask"], vtrace_lambda=LAMBDA)
    want = returns.gae(*args, LAMBDA, data["mask"])
    np.testing.assert_allclose(got.pg_advantages, want.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.vs, want.targets, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        returns.gae(*args, 1.0, data["mask"]).targets,
        returns.n_step_returns(*args, 100, data["mask"]),
        rtol=1e-4,
        atol=1e-5,
    )


@every_function
def test_jit_equals_no_jit_and_is_float32(name):
    data = random_data(5, 9, 3)
    data["mask"][4, 1] = False
    for plain, jitted in zip(jax.tree.leaves(FUNCTIONS[name](data)), run(name, data), strict=True):
        assert plain.dtype == np.float32 and plain.shape == (9, 3)
        np.testing.assert_allclose(plain, jitted, rtol=1e-5, atol=1e-6)
    half = {k: v if k == "mask" else jnp.asarray(v, jnp.bfloat16) for k, v in data.items()}
    assert all(x.dtype == np.float32 for x in run(name, half))


@every_function
def test_gradients_stop_where_the_paper_needs_it(name):
    data = random_data(6, 5, 1)
    data["mask"][2] = False

    def total(values):
        leaves = jax.tree.leaves(FUNCTIONS[name]({**data, "values": values}))
        return sum(jnp.sum(x[:2]) for x in leaves)

    gradient = np.asarray(jax.grad(total)(jnp.asarray(data["values"])))[:, 0]
    if name in ("gae", "vtrace", "retrace"):
        np.testing.assert_array_equal(gradient, 0.0)
    else:  # up to the truncated step's value, and no further
        assert gradient[2] > 0
        np.testing.assert_array_equal(gradient[3:], 0.0)
        eps = np.zeros_like(data["values"])
        eps[2] = 0.1
        difference = (total(data["values"] + eps) - total(data["values"] - eps)) / 0.2
        np.testing.assert_allclose(gradient[2], difference, rtol=1e-3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": np.zeros(3)}, "rewards must be"),
        ({"rewards": np.zeros((0, 2)), "mask": np.zeros((0, 2))}, "T >= 1"),
        ({"values": np.zeros((3, 2))}, r"values must be .* \(4, 2\)"),
        ({"discounts": np.zeros((3, 1))}, "discounts must have the shape"),
        ({"mask": np.zeros(3)}, "mask must have the shape"),
    ],
)
@every_function
def test_wrong_shapes_raise(name, change, message):
    data = {**random_data(0, 3, 2), **change}
    if "rewards" in change:
        data["q_taken"] = data["log_rhos"] = change["rewards"]
    with pytest.raises(ValueError, match=message):
        JITTED[name](data)


def test_wrong_off_policy_shapes_and_n_raise():
    data = random_data(0, 3, 2)
    with pytest.raises(ValueError, match=r"vtrace: log_rhos must"):
        FUNCTIONS["vtrace"]({**data, "log_rhos": np.zeros((3, 2, 1))})
    with pytest.raises(ValueError, match=r"retrace: q_taken must"):
        FUNCTIONS["retrace"]({**data, "q_taken": np.zeros((4, 2))})
    with pytest.raises(ValueError, match=r"n must be at least 1; got 0"):
        returns.n_step_returns(data["rewards"], data["discounts"], data["values"], 0, data["mask"])


def test_value_rescaling():
    # by hand at eps 1e-3: h(3) = 2 - 1 + 0.003
    np.testing.assert_allclose(returns.signed_hyperbolic(3.0), 1.003, rtol=1e-6)
    np.testing.assert_allclose(returns.signed_parabolic(1.003), 3.0, rtol=1e-6)
    x = np.concatenate([-np.logspace(-4, 5, 40), [0.0], np.logspace(-4, 5, 40)]).astype(np.float32)
    np.testing.assert_allclose(
        returns.signed_parabolic(returns.signed_hyperbolic(x)), x, rtol=2e-5, atol=1e-9
    )
    np.testing.assert_allclose(
        returns.signed_hyperbolic(returns.signed_parabolic(x / 100)), x / 100, rtol=2e-5, atol=1e-9
    )
    # The slope at 0 is 1/2 + eps; the inverse has the reciprocal slope.
    np.testing.assert_allclose(jax.grad(returns.signed_hyperbolic)(0.0), 0.501, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(returns.signed_parabolic)(0.0), 1 / 0.501, rtol=1e-6)


@pytest.mark.launchpad
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("terminated", [True, False])
def test_against_rlax(terminated):
    rlax = pytest.importorskip("rlax")
    data = random_data(8, 12, 1)
    if terminated:
        data["discounts"][5] = 0.0
    r, g, v, q, log_rho = (
        jnp.asarray(data[key][:, 0])
        for key in ("rewards", "discounts", "values", "q_taken", "log_rhos")
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    advantages, _ = run("gae", data)
    close(advantages[:, 0], rlax.truncated_generalized_advantage_estimation(r, g, LAMBDA, v))
    close(run("lambda_returns", data)[0][:, 0], rlax.lambda_returns(r, g, v[1:], LAMBDA))
    close(run("discounted_returns", data)[0][:, 0], rlax.discounted_returns(r, g, v[1:]))
    close(run("n_step_returns_3", data)[0][:, 0], rlax.n_step_bootstrapped_returns(r, g, v[1:], 3))
    want = rlax.vtrace_td_error_and_advantage(
        v[:-1], v[1:], r, g, jnp.exp(log_rho), LAMBDA, 1.0, CLIPS["clip_pg_rho"]
    )
    got = returns.vtrace(
        data["log_rhos"],
        *(data[key] for key in ("rewards", "discounts", "values", "mask")),
        clip_pg_rho=CLIPS["clip_pg_rho"],
        vtrace_lambda=LAMBDA,
    )
    close(got.vs[:, 0] - v[:-1], want.errors)
    close(got.pg_advantages[:, 0], want.pg_advantage)
    want_q = rlax.general_off_policy_returns_from_q_and_v(
        q[1:], v[1:], r, g, LAMBDA * jnp.minimum(1.0, jnp.exp(log_rho[1:]))
    )
    close(run("retrace", data)[0][:, 0], want_q)
    x = jnp.linspace(-30.0, 30.0, 21)
    close(returns.signed_hyperbolic(x), rlax.signed_hyperbolic(x))
    np.testing.assert_allclose(
        returns.signed_parabolic(x), rlax.signed_parabolic(x), rtol=1e-3, atol=1e-4
    )
