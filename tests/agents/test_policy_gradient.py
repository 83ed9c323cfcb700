"""IMPALA, A2C and REINFORCE: losses against slow plain Python, boundaries, recurrence, optimizers.

The agents differ only in their advantages and targets; V-trace is also compared with rlax.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.a2c import A2C, A2CConfig
from rlstack.agents.impala import Impala, ImpalaConfig
from rlstack.agents.reinforce import Reinforce, ReinforceConfig
from rlstack.exploration import Sample
from rlstack.families.policy_gradient import PolicyGradientOutput, explained_variance, kl_estimate
from rlstack.networks import ActorCriticOutput, Network
from rlstack.types import Batch, TimeStep, Trajectory
from tests.agent_cases import (
    FAST,
    FIRST,
    GRU,
    LAST,
    LSTM,
    MASKED,
    MID,
    NESTED,
    ONE_OF_4,
    REAL,
    S5,
    SEVERAL,
    SMALL,
    STRUCTURED,
    VECTOR,
    Setting,
    acted_batch,
    assert_close,
    case,
    quick_jit,
    step_types,
)

SMALL_IMPALA = ImpalaConfig(optimizer=FAST, entropy_cost=0.0)
A2C_BY_GAE = A2CConfig(optimizer=FAST, entropy_cost=0.0, gae_lambda=0.9)
A2C_STANDARDISED = A2CConfig(optimizer=FAST, entropy_cost=0.0, normalise_advantages=True)
REINFORCE = ReinforceConfig(optimizer=FAST, entropy_cost=0.0)
WITHOUT_BASELINE = dataclasses.replace(REINFORCE, baseline=False)
SETTINGS = {
    "impala": Setting(SMALL_IMPALA, VECTOR, ONE_OF_4),
    "impala-lstm": Setting(SMALL_IMPALA, MASKED, ONE_OF_4, LSTM),
    "impala-s5": Setting(SMALL_IMPALA, VECTOR, ONE_OF_4, S5),
    "impala-shared": Setting(SMALL_IMPALA, VECTOR, REAL, dataclasses.replace(SMALL, shared=True)),
    "a2c": Setting(A2C_BY_GAE, NESTED, STRUCTURED),
    "a2c-gru": Setting(A2C_STANDARDISED, VECTOR, SEVERAL, GRU),
    "reinforce": Setting(REINFORCE, MASKED, ONE_OF_4),
    "reinforce-gru": Setting(WITHOUT_BASELINE, VECTOR, REAL, GRU),
}

DISCOUNT = 0.9
KINDS = {Impala: ImpalaConfig, A2C: A2CConfig, Reinforce: ReinforceConfig}
UNSCALED = {A2C: {}, Reinforce: {"normalise_advantages": False}}
PARAMS = {
    "policy_head": jax.random.normal(jax.random.PRNGKey(1), (3, 4)),
    "value_head": jnp.array([0.5, -1.0, 2.0]),
}


def linear_network():
    """Logits and a value that are linear in the observation."""

    def apply(key, params, timestep, state):
        x = timestep.observation
        return ActorCriticOutput(x @ params["policy_head"], x @ params["value_head"]), state

    return Network(lambda key: PARAMS, apply, apply, lambda batch_size: ())


def make(kind, **config):
    cfg = KINDS[kind](**{"discount": DISCOUNT, "entropy_cost": 0.0, **config})
    return kind(cfg, VECTOR, ONE_OF_4, lambda *_: linear_network(), Sample)


def unrolls(columns, truncated=(), seed=0):
    """A trajectory of these step types with another policy's actions; some ends are time limits."""
    rng = np.random.default_rng(seed)
    step_type = np.array(columns, np.int32).T
    discount = np.where(step_type == LAST, 0, 1).astype(np.float32)
    discount[:, list(truncated)] = 1
    reward = np.where(step_type == FIRST, 0, rng.normal(size=step_type.shape)).astype(np.float32)
    observation = rng.normal(size=(*step_type.shape, 3)).astype(np.float32)
    action = rng.integers(0, 4, step_type.shape).astype(np.int32)
    behaviour = np.log(rng.uniform(0.1, 0.7, step_type.shape)).astype(np.float32)
    return Trajectory(
        TimeStep(step_type, reward, discount, observation),
        PolicyGradientOutput(action, behaviour, np.full(step_type.shape, np.nan, np.float32)),
        (),
        np.zeros(step_type.shape, np.int32),
    )


def batched(trajectory):
    return Batch(trajectory, np.ones(trajectory.params_version.shape[1], np.float32))


# All kinds of boundary: none; an end inside; a time limit inside; ends at the unroll's end.
COLUMNS = [
    [MID, MID, MID, MID, MID],
    [FIRST, MID, LAST, FIRST, MID],
    [MID, LAST, FIRST, MID, MID],
    [MID, MID, MID, MID, LAST],
    [MID, LAST, FIRST, MID, LAST],
]
TRUNCATED = (2, 3)


class Plain:
    """The linear network's outputs for a trajectory, in numpy, and its episodes."""

    def __init__(self, trajectory):
        timestep, taken = trajectory.timestep, trajectory.agent_output
        logits = timestep.observation @ np.asarray(PARAMS["policy_head"])
        self.log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        self.log_prob = np.take_along_axis(self.log_probs, taken.action[..., None], -1)[..., 0]
        self.value = timestep.observation @ np.asarray(PARAMS["value_head"])
        self.ratio = np.exp(self.log_prob - taken.behaviour_log_prob)
        self.reward, self.discount = timestep.reward, timestep.discount * DISCOUNT
        self.pieces = []  # (column, first step, last step) of every piece of an episode
        for b, kinds in enumerate(timestep.step_type.T):
            starts = [0, *np.flatnonzero(kinds[1:] == FIRST) + 1]
            self.pieces += [
                (b, start, end - 1) for start, end in itertools.pairwise([*starts, len(kinds)])
            ]
        self.ends = timestep.step_type == LAST

    def loss(self, estimate, value_cost, entropy_cost, standardise=False, weigh=False):
        """The loss; ``estimate(piece)`` returns [(t, advantage, target)] of a piece.

        With ``weigh``, each error counts by the probability of the action over that in acting, at
        most 1.
        """
        rows = [(piece[0], *row) for piece in self.pieces for row in estimate(piece)]
        advantages = np.array([advantage for _, _, advantage, _ in rows])
        if standardise:
            advantages = (advantages - advantages.mean()) / advantages.std()
        total = 0.0
        for (b, t, _, target), advantage in zip(rows, advantages, strict=True):
            entropy = -(np.exp(self.log_probs[t, b]) * self.log_probs[t, b]).sum()
            weight = min(1.0, self.ratio[t, b]) if weigh else 1.0
            total -= weight * advantage * self.log_prob[t, b]
            total += value_cost * 0.5 * (weight * (target - self.value[t, b])) ** 2
            total -= entropy_cost * entropy
        return total / len(rows), len(rows)

    def vtrace(self, piece, clip_rho=1.0, clip_c=1.0, clip_pg_rho=1.0, decay=1.0):
        """Equation 1 of the paper as a sum, with lambda of remark 2."""
        b, start, end = piece
        r, d, v, ratio = self.reward[:, b], self.discount[:, b], self.value[:, b], self.ratio[:, b]

        def target(s):
            total = v[s]
            for t in range(s, end):
                delta = min(clip_rho, ratio[t]) * (r[t + 1] + d[t + 1] * v[t + 1] - v[t])
                weight = 1.0
                for i in range(s, t):
                    weight *= d[i + 1] * decay * min(clip_c, ratio[i])
                total += weight * delta
            return total

        rows = []
        for t in range(start, end):
            following = decay * target(t + 1) + (1 - decay) * v[t + 1] if t + 1 < end else v[t + 1]
            advantage = min(clip_pg_rho, ratio[t]) * (r[t + 1] + d[t + 1] * following - v[t])
            rows.append((t, advantage, target(t)))
        return rows

    def gae(self, piece, decay=1.0):
        """Exponentially weighted sums of one-step errors."""
        b, start, end = piece
        r, d, v = self.reward[:, b], self.discount[:, b], self.value[:, b]
        rows = []
        for s in range(start, end):
            advantage, weight = 0.0, 1.0
            for t in range(s, end):
                advantage += weight * (r[t + 1] + d[t + 1] * v[t + 1] - v[t])
                weight *= d[t + 1] * decay
            rows.append((s, advantage, advantage + v[s]))
        return rows

    def monte_carlo(self, piece, baseline):
        """Full returns of episodes that end in the piece; time limits add the last value."""
        b, start, end = piece
        if not self.ends[end, b]:
            return []
        rows = []
        for s in range(start, end):
            total, weight = 0.0, 1.0
            for t in range(s + 1, end + 1):
                total += weight * self.reward[t, b]
                weight *= self.discount[t, b]
            if baseline:
                total += weight * self.value[end, b]
            rows.append((s, total - self.value[s, b] * baseline, total))
        return rows


@pytest.mark.parametrize(
    "clips", [(1.0, 1.0, 1.0, 1.0), (2.0, 0.7, 1.3, 0.8)], ids=["paper", "others"]
)
def test_impalas_loss_is_the_papers(clips):
    names = ("clip_rho", "clip_c", "clip_pg_rho", "vtrace_lambda")
    agent = make(Impala, entropy_cost=0.1, value_cost=0.7, **dict(zip(names, clips, strict=True)))
    trajectory = unrolls(COLUMNS, TRUNCATED)
    plain = Plain(trajectory)
    assert (plain.ratio > 2).any() and (plain.ratio < 0.7).any()
    expected, num_rows = plain.loss(lambda piece: plain.vtrace(piece, *clips), 0.7, 0.1)
    assert num_rows == 5 * 4 - 3
    loss, logs = quick_jit(agent.loss)(PARAMS, batched(trajectory))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    parts = logs["policy_loss"] + 0.7 * logs["value_loss"] - 0.1 * logs["entropy"]
    np.testing.assert_allclose(loss, parts, rtol=1e-5)


@pytest.mark.parametrize(("decay", "standardise"), [(1.0, False), (0.8, True)])
def test_a2cs_loss_is_that_of_advantages_to_the_end_of_the_unroll(decay, standardise):
    agent = make(
        A2C,
        gae_lambda=decay,
        normalise_advantages=standardise,
        value_cost=0.7,
        entropy_cost=0.1,
    )
    trajectory = unrolls(COLUMNS, TRUNCATED)
    plain = Plain(trajectory)
    expected, _ = plain.loss(
        lambda piece: plain.gae(piece, decay), 0.7, 0.1, standardise, weigh=True
    )
    np.testing.assert_allclose(
        quick_jit(agent.loss)(PARAMS, batched(trajectory))[0], expected, rtol=1e-5
    )


@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("baseline", [True, False])
def test_reinforces_loss_is_that_of_whole_returns(baseline, standardise):
    agent = make(
        Reinforce,
        baseline=baseline,
        normalise_advantages=standardise,
        value_cost=0.7,
        entropy_cost=0.1,
    )
    trajectory = unrolls(COLUMNS, TRUNCATED)
    plain = Plain(trajectory)
    value_cost = 0.7 if baseline else 0.0
    expected, num_rows = plain.loss(
        lambda piece: plain.monte_carlo(piece, baseline), value_cost, 0.1, standardise, weigh=True
    )
    # Rows per column: none; the two before the end; one; all; one and two.
    assert num_rows == 0 + 2 + 1 + 4 + 3
    loss, logs = quick_jit(agent.loss)(PARAMS, batched(trajectory))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(logs["complete"], num_rows / 17, rtol=1e-6)
    assert (logs["value_loss"] == 0) == (not baseline)
    grads = jax.grad(agent.loss, has_aux=True)(PARAMS, batched(trajectory))[0]
    assert np.any(grads["value_head"] != 0) == baseline


@pytest.mark.slow
@pytest.mark.chosen
def test_a_batch_without_an_end_teaches_reinforce_nothing():
    agent = make(Reinforce, entropy_cost=0.1)
    grads, logs = jax.grad(agent.loss, has_aux=True)(
        PARAMS, batched(unrolls([[MID] * 5, [FIRST, *[MID] * 4]]))
    )
    assert all(np.all(x == 0) for x in jax.tree.leaves(grads))
    assert logs["complete"] == 0 and np.isfinite(logs["loss"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_a_boundary_and_what_is_no_transition_do_not_matter(kind):
    """Column 0 ends by a time limit: its last observation counts, its last action does not."""
    agent = make(kind, entropy_cost=0.1)
    gradient = quick_jit(
        lambda trajectory: jax.grad(agent.loss, has_aux=True)(PARAMS, batched(trajectory))[0]
    )
    trajectory = unrolls([[MID, MID, LAST, FIRST, LAST]], truncated=(0,))
    before = gradient(trajectory)
    changed = jax.tree.map(np.copy, trajectory)
    changed.timestep.reward[3, 0] = 100.0  # the reward at FIRST
    changed.timestep.discount[3, 0] = 0.5
    changed.agent_output.action[2, 0] = (changed.agent_output.action[2, 0] + 1) % 4
    changed.agent_output.behaviour_log_prob[2, 0] = -100.0
    assert_close(gradient(changed), before, atol=0, rtol=0)
    changed.timestep.observation[2, 0] += 1.0
    assert np.abs(gradient(changed)["policy_head"] - before["policy_head"]).max() > 1e-3

    # An unroll with an end inside equals two unrolls, except for the mean.
    whole = unrolls([[MID, MID, LAST, FIRST, MID, LAST]])
    halves = [jax.tree.map(lambda x, s=s: x[s], whole) for s in (slice(0, 3), slice(3, 6))]
    parts = [gradient(half) for half in halves]
    if not getattr(agent.cfg, "normalise_advantages", False):
        mean = jax.tree.map(lambda x, y: (x + y) / 2, *parts)
        assert_close(gradient(whole), mean)


@pytest.mark.parametrize("kind", [A2C, Reinforce])
def test_an_action_of_older_params_counts_as_often_as_the_new_ones_choose_it(kind):
    """Two steps of an unroll: older params chose the first action, twice as likely as the learner.

    The policy and the value of a network of zeros are uniform and 0. So the gradient of the logits
    is advantage x (1/4 - chosen), and that of the value is minus the error, over two steps.
    """
    agent = make(kind, value_cost=1.0, max_grad_norm=0.0, **UNSCALED[kind])
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    trajectory = Trajectory(
        TimeStep(
            np.array([[MID], [MID], [LAST]], np.int32),
            np.array([[0], [1], [2]], np.float32),
            np.array([[1], [1], [0]], np.float32),
            np.array([[[1, 0, 0]], [[0, 1, 0]], [[0, 0, 1]]], np.float32),
        ),
        PolicyGradientOutput(
            np.array([[3], [0], [0]], np.int32),
            np.log(np.array([[0.5], [0.25], [0.25]], np.float32)),
            np.zeros((3, 1), np.float32),
        ),
        (),
        np.array([[6], [7], [7]], np.int32),
    )
    grads = jax.grad(agent.loss, has_aux=True)(zeros, batched(trajectory))[0]
    old, new = (1 + 0.9 * 2) / 2, 2.0  # returns; the old action is chosen half as often now
    np.testing.assert_allclose(
        grads["policy_head"],
        [
            [old / 8, old / 8, old / 8, -3 * old / 8],
            [-3 * new / 8, new / 8, new / 8, new / 8],
            [0] * 4,
        ],
        rtol=1e-5,
    )
    np.testing.assert_allclose(grads["value_head"], [-old / 2, -new / 2, 0], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_passes_through_advantages_and_targets(kind):
    """The value head's gradient is (value - target) x observation; the policy loss adds nothing."""
    agent = make(kind, value_cost=1.0)
    trajectory = unrolls([[MID, LAST]] * 3)
    grads = jax.grad(agent.loss, has_aux=True)(PARAMS, batched(trajectory))[0]
    x, plain = trajectory.timestep.observation[0], Plain(trajectory)
    rho = np.minimum(1.0, plain.ratio[0])
    error = rho * (plain.value[0] - plain.reward[1])
    np.testing.assert_allclose(grads["value_head"], (error[:, None] * x).mean(0), rtol=1e-4)


def test_on_policy_vtrace_is_the_actor_critics():
    trajectory = unrolls(COLUMNS, TRUNCATED)
    own = trajectory.agent_output._replace(behaviour_log_prob=Plain(trajectory).log_prob)
    trajectory = trajectory._replace(agent_output=own)
    losses = [make(kind).loss(PARAMS, batched(trajectory)) for kind in (Impala, A2C)]
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-5)
    np.testing.assert_allclose(losses[0][1]["kl"], 0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", [A2C, Impala, Reinforce])
def test_an_action_that_was_all_but_impossible_leaves_every_log_finite(kind):
    """exp(100) is beyond float32; only the log of the divergence contains it."""
    trajectory = unrolls([[MID, LAST], [MID, LAST]])
    own = trajectory.agent_output.behaviour_log_prob.copy()
    own[0, 0] = -100.0
    output = trajectory.agent_output._replace(behaviour_log_prob=own)
    batch = batched(trajectory._replace(agent_output=output))
    (_, logs), grads = jax.value_and_grad(make(kind).loss, has_aux=True)(PARAMS, batch)
    for x in jax.tree.leaves((logs, grads)):
        assert np.isfinite(x).all()
    assert logs["kl"] > 1e6  # and still says that the policies differ


def test_the_estimate_of_the_divergence_by_hand():
    # exp(0.5) - 1.5 = 0.148721; exp(-1) - 1 + 1 = 0.367879; the masked entry is left out.
    found = kl_estimate(np.float32([0.5, -1.0, 300.0]), np.array([True, True, False]))
    np.testing.assert_allclose(found, (0.148721 + 0.367879) / 2, rtol=1e-5)
    largest = kl_estimate(np.float32([400.0]), np.array([True]))
    np.testing.assert_allclose(largest, 485165174.4, rtol=1e-6)  # exp(20) - 21


@pytest.mark.launchpad
@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_impalas_loss_is_rlaxs(decay):
    rlax = pytest.importorskip("rlax")
    trajectory = unrolls([[MID] * 6, [FIRST, *[MID] * 5], [*[MID] * 5, LAST]], seed=3)
    plain = Plain(trajectory)
    vtrace = functools.partial(rlax.vtrace_td_error_and_advantage, lambda_=decay)
    ours = jax.tree.map(
        jnp.asarray,
        (plain.value[:-1], plain.value[1:], plain.reward[1:], plain.discount[1:], plain.ratio[:-1]),
    )
    found = jax.vmap(vtrace, in_axes=1, out_axes=1)(*ours)
    logits = trajectory.timestep.observation[:-1] @ PARAMS["policy_head"]
    policy_losses = [
        rlax.policy_gradient_loss(
            logits[:, b],
            trajectory.agent_output.action[:-1, b],
            found.pg_advantage[:, b],
            jnp.ones(5),
        )
        for b in range(3)
    ]
    expected = jnp.mean(jnp.stack(policy_losses)) + 0.5 * 0.5 * jnp.mean(found.errors**2)
    loss, _ = make(Impala, vtrace_lambda=decay).loss(PARAMS, batched(trajectory))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["impala-lstm", "a2c-gru", "reinforce-gru"])
def test_the_learner_unrolls_from_the_stored_state(name):
    c = case(name)
    # A policy far from uniform; otherwise its probabilities hardly depend on the state.
    head = jax.tree.map(lambda x: 100 * x, c.params["policy_head"])
    params = {**c.params, "policy_head": head}
    trajectory = acted_batch(c, params, step_types()).trajectory
    unrolled = quick_jit(c.agent.unrolled)
    said = unrolled(params, trajectory)
    mask = trajectory.timestep.step_type[1:] != FIRST
    np.testing.assert_array_equal(said.mask, mask)
    np.testing.assert_allclose(said.log_rhos, 0, atol=1e-4)
    assert_close(said.value, trajectory.agent_output.value, atol=1e-5)
    forgetful = trajectory._replace(agent_state=jax.tree.map(np.zeros_like, trajectory.agent_state))
    other = unrolled(params, forgetful)
    assert np.abs(other.log_rhos[0]).max() > 1e-3
    # Column 2 begins an episode inside the unroll, with a reset state.
    assert_close(other.value[3:, 2], said.value[3:, 2], atol=1e-6)


def test_explained_variance_is_the_share_of_the_targets_variance():
    targets, mask = jnp.array([[1.0, 2.0], [3.0, 100.0]]), jnp.array([[True, True], [True, False]])

    def explained(values):
        return float(explained_variance(jnp.asarray(values), targets, mask))

    assert explained(targets + 5.0) == pytest.approx(1.0)  # a constant error explains all
    assert explained(jnp.full((2, 2), 7.0)) == pytest.approx(0.0)
    assert explained(-targets) == pytest.approx(-3.0)  # Var(2 x targets) = 4 Var(targets)
    still = jnp.ones((2, 2))
    assert float(explained_variance(targets, still, mask)) == 0.0
