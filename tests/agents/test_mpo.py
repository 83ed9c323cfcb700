"""MPO and V-MPO: losses by hand, duals, targets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.mpo import MPO, MPOConfig, MPOOutput
from rlstack.agents.vmpo import VMPO, VMPOConfig
from rlstack.distributions import Normal
from rlstack.exploration import Greedy
from rlstack.families.epochs import EpochRows
from rlstack.families.policy_gradient import PolicyGradientOutput
from rlstack.math import constraints
from rlstack.networks import NetworkConfig, actor_critic, policy_and_critic
from tests.agent_cases import (
    FAST,
    FIRST,
    GRU,
    LAST,
    MASKED,
    MID,
    NESTED,
    ONE_OF_4,
    STRUCTURED,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
)
from tests.agents.linear_control import (
    DISCOUNT,
    SGD,
    make_batch,
    moved,
    networks,
    scaled,
    unit,
    values_of,
)

SMALL_MPO = MPOConfig(
    optimizer=FAST, duals_optimizer=FAST, temperature=0.1, target_period=5, epsilon_mean=0.1
)
SMALL_VMPO = VMPOConfig(optimizer=FAST, num_minibatches=2, temperature=0.1, epsilon_policy=0.1)
SETTINGS = {
    "mpo": Setting(SMALL_MPO, VECTOR, UNEVEN),
    "mpo-discrete": Setting(SMALL_MPO, MASKED, ONE_OF_4),
    "vmpo": Setting(SMALL_VMPO, MASKED, ONE_OF_4),
    "vmpo-continuous": Setting(SMALL_VMPO, VECTOR, UNEVEN),
    "vmpo-gru": Setting(SMALL_VMPO, VECTOR, ONE_OF_4, GRU),
    "vmpo-structured": Setting(SMALL_VMPO, NESTED, STRUCTURED),
}
KEY = jax.random.PRNGKey(7)
ITEMS = [[MID, MID, MID], [FIRST, LAST, FIRST], [MID, LAST, FIRST], [LAST, FIRST, MID]]
ENDS = [2, 1, 1, 1]


def items():
    discounts = np.ones((3, 4), np.float32)
    discounts[1, 1] = 0
    return make_batch(ITEMS, MPOOutput, discounts=discounts, weights=[1, 2, 0.5, 1])


def gaussian(weights, observation):
    """Mean and standard deviation of a linear policy, by definition."""
    mean, raw = np.split(np.asarray(observation @ np.asarray(weights), np.float64), 2, axis=-1)
    return mean, np.log1p(np.exp(raw)) * 0.7 / np.log(2) + 1e-6


def log_prob(actions, mean, std):
    each = -0.5 * ((actions - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return each.sum(-1)


def log_mean_exp(x):
    return np.log(np.exp(x).mean(0))


def test_the_losses_of_mpo_by_hand():
    count = 6
    cfg = MPOConfig(
        discount=DISCOUNT,
        optimizer=SGD,
        num_critics=2,
        num_actions=count,
        temperature=0.5,
        epsilon=0.2,
        epsilon_mean=0.03,
        epsilon_std=0.02,
        alpha_mean=8.0,
        alpha_std=300.0,
        epsilon_penalty=0.05,
    )
    agent = MPO(cfg, VECTOR, UNEVEN, lambda *_: networks(4), Greedy)
    params = scaled(agent.initial_params(KEY)._replace(duals={}), 0.5)
    params = params._replace(duals=agent.initial_params(KEY).duals)
    old = scaled(agent.initial_params(jax.random.PRNGKey(8)), 0.3)
    batch = items()
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, old.policy, old.critics, batch)

    now_key, end_key = jax.random.split(KEY)
    steps = batch.trajectory.timestep

    def sample(key, mean, std):
        keys = jax.random.split(key, count)
        noise = np.stack([jax.random.normal(k, mean.shape) for k in keys])
        return mean + std * noise

    def judged(observation, actions):
        return np.stack(
            [values_of(old.critics, observation, np.clip(a, -1, 1)).min(-1) for a in actions]
        )

    ends = steps.observation[ENDS, range(4)]
    value = judged(ends, sample(end_key, *gaussian(old.policy, ends))).mean(0)
    reward = steps.reward
    goals = np.array(
        [
            reward[1, 0] + DISCOUNT * reward[2, 0] + DISCOUNT**2 * value[0],
            reward[1, 1],
            reward[1, 2] + DISCOUNT * value[2],
        ]
    )
    taken = values_of(
        params.critics, steps.observation[0], unit(batch.trajectory.agent_output.action[0])
    )
    errors = goals[:, None] - taken[:3]
    critic_loss = (np.array([1, 2, 0.5])[:, None] * 0.5 * errors**2).sum() / 4
    np.testing.assert_allclose(logs["critic_loss"], critic_loss, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*np.abs(errors).mean(-1), 0], rtol=1e-4)

    observation = steps.observation[0]
    mean, std = gaussian(params.policy, observation)
    old_mean, old_std = gaussian(old.policy, observation)
    actions = sample(now_key, old_mean, old_std)
    values = judged(observation, actions)
    distance = np.linalg.norm(actions - np.clip(actions, -1, 1), axis=-1)
    assert distance.max() > 0  # the penalty matters
    weights = np.exp(values / 0.5) / np.exp(values / 0.5).sum(0)
    weights += np.exp(-distance / 0.5) / np.exp(-distance / 0.5).sum(0)
    fit = log_prob(actions, mean, old_std) + log_prob(actions, old_mean, std)
    policy_loss = -(weights * fit).sum(0)[:3].sum() / 4
    kl_mean = ((mean - old_mean) ** 2 / (2 * old_std**2))[:3].sum(0) / 4
    kl_std = (np.log(std / old_std) + old_std**2 / (2 * std**2) - 0.5)[:3].sum(0) / 4
    policy_loss += 8.0 * kl_mean.sum() + 300.0 * kl_std.sum()
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-3)
    dual_loss = 0.5 * (0.2 + log_mean_exp(values / 0.5)[:3].sum() / 4)
    dual_loss += 0.5 * (0.05 + log_mean_exp(-distance / 0.5)[:3].sum() / 4)
    dual_loss += 8.0 * (0.03 - kl_mean).sum() + 300.0 * (0.02 - kl_std).sum()
    np.testing.assert_allclose(loss, critic_loss + policy_loss + dual_loss, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.chosen
def test_the_losses_of_discrete_mpo_by_hand():
    cfg = MPOConfig(discount=DISCOUNT, optimizer=SGD, num_critics=2, temperature=0.5)
    factory = functools.partial(policy_and_critic, cfg=NetworkConfig(hidden_sizes=(6,)))
    agent = MPO(cfg, MASKED, ONE_OF_4, factory, Greedy)
    params, old = agent.initial_params(KEY), agent.initial_params(jax.random.PRNGKey(8))
    batch = make_batch([[MID, MID]] * 3, MPOOutput)
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]], np.float32)
    observation = {
        "observation": batch.trajectory.timestep.observation,
        "action_mask": np.stack([mask, mask[::-1]]),
    }
    timestep = batch.trajectory.timestep._replace(observation=observation)
    output = MPOOutput(np.ones((2, 3), np.int32))
    batch = batch._replace(
        trajectory=batch.trajectory._replace(timestep=timestep, agent_output=output)
    )
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, old.policy, old.critics, batch)

    def said(network, network_params, t):
        step = jax.tree.map(lambda x: x[t], timestep)
        return np.asarray(quick_jit(network.apply)(None, network_params, step, ())[0])

    policy_loss = dual_loss = kl_sum = log_mean = critic_loss = 0.0
    for b in range(3):

        def probs(part, t, b=b):
            legal = np.flatnonzero(observation["action_mask"][t, b])
            logits = said(agent.network.policy, part.policy, t)[b, legal]
            return legal, np.exp(logits) / np.exp(logits).sum()

        legal, after = probs(old, 1)
        ends = said(agent.critics, old.critics, 1)[b][:, legal]
        goal = timestep.reward[1, b] + DISCOUNT * (ends * after).sum(-1).min()
        taken = said(agent.critics, params.critics, 0)[b][:, 1]
        critic_loss += 0.5 * ((goal - taken) ** 2).sum() / 3
        np.testing.assert_allclose(priorities[b], np.abs(goal - taken).mean(), rtol=1e-4)
        legal, before = probs(old, 0)
        _, new = probs(params, 0)
        values = said(agent.critics, old.critics, 0)[b].min(0)[legal]
        scores = before * np.exp(values / 0.5)
        policy_loss -= (scores / scores.sum() * np.log(new)).sum() / 3
        log_mean += np.log(scores.sum()) / 3
        kl_sum += (before * np.log(before / new)).sum() / 3
    policy_loss += 3.0 * kl_sum
    dual_loss = 0.5 * (0.1 + log_mean) + 3.0 * (2.5e-3 - kl_sum)
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4)
    np.testing.assert_allclose(loss, critic_loss + policy_loss + dual_loss, rtol=1e-4)


def test_targets_of_mpo_follow_their_period():
    cfg = MPOConfig(optimizer=SGD, target_period=2, target_rate=0.25, num_actions=3)
    agent = MPO(cfg, VECTOR, UNEVEN, lambda *_: networks(4), Greedy)
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    batch, step = make_batch([[MID, MID]] * 5, MPOOutput), quick_jit(agent.learner_step)
    target = params.policy, params.critics
    for number in (1, 2, 3, 4):
        params, state, _ = step(params, state, batch)
        if number % 2 == 0:
            target = moved(target, (params.policy, params.critics), 0.25)
        assert_close((state.target_policy, state.target_critics), target)


def test_actions_are_clipped_to_the_bounds():
    agent = MPO(MPOConfig(), VECTOR, UNEVEN, lambda *_: networks(4), Greedy)
    far = jnp.zeros((3, 4)).at[:, 0].set(9.0).at[:, 1].set(-9.0)
    params = agent.initial_params(KEY)._replace(policy=far)
    step = random_timesteps(VECTOR, np.ones(4))._replace(observation=np.ones((4, 3), np.float32))
    action = agent.actor_step(KEY, params, step, agent.initial_state(4))[0].action
    np.testing.assert_array_equal(action, np.tile([2.0, 0.0], (4, 1)))


def test_the_parts_of_a_divergence_are_the_divergences_of_one_change():
    rng = np.random.default_rng(0)
    old, new = (Normal(*rng.normal(size=(2, 5, 3))) for _ in range(2))
    of_mean, of_std = old.decoupled_kl(new)
    np.testing.assert_allclose(of_mean.sum(-1), old.kl(Normal(new.mean, old.log_std)), rtol=1e-5)
    np.testing.assert_allclose(of_std.sum(-1), old.kl(Normal(old.mean, new.log_std)), rtol=1e-5)


def test_duals_move_until_the_bounds_hold():
    assert np.isclose(constraints.dual(constraints.raw_dual(0.3)), 0.3, atol=1e-6)
    assert np.isclose(constraints.dual(constraints.raw_dual(1000.0)), 1000.0)
    # A divergence above its bound raises the multiplier, one below lowers it.
    slope = jax.grad(lambda alpha, kl: constraints.kl_losses(kl, alpha, 0.1)[1])
    assert slope(2.0, 0.3) < 0 < slope(2.0, 0.05)
    # At the best temperature, the weighted distribution has the bound's divergence.
    values, bound = np.array([0.0, 1.0, 3.0]), 0.2

    def loss(temperature):
        return constraints.temperature_loss(
            jax.nn.logsumexp(values / temperature) - np.log(3), temperature, bound
        )

    grid = np.linspace(0.5, 10, 2000)
    best = grid[np.argmin(jax.vmap(loss)(grid))]
    weights = np.exp(values / best) / np.exp(values / best).sum()
    np.testing.assert_allclose((weights * np.log(3 * weights)).sum(), bound, atol=2e-3)


def rows_of(agent, params, count=6):
    """Rows with random observations, of which one has no transition."""
    rng = np.random.default_rng(4)
    timestep = random_timesteps(VECTOR, np.full(count, MID))
    old = agent.initial_params(jax.random.PRNGKey(9))
    policy = agent.network.apply(None, old, timestep, ())[0].policy
    shape = agent.action_spec.shape
    if shape:
        action = rng.normal(size=(count, *shape)).astype(np.float32)
    else:
        action = rng.integers(0, 4, count).astype(np.int32)
    mask = np.arange(count) != 2
    advantage = np.array([0.3, -1.0, 9.0, 0.8, -0.2, 0.1], np.float32)
    output = PolicyGradientOutput(action, np.zeros(count, np.float32), np.zeros(count, np.float32))
    target = rng.normal(size=count).astype(np.float32)
    return EpochRows(timestep, output, advantage, target, mask, (), old_policy=policy)


@pytest.mark.parametrize("action_spec", [ONE_OF_4, UNEVEN], ids=["discrete", "continuous"])
def test_the_loss_of_vmpo_by_hand(action_spec):
    cfg = VMPOConfig(
        temperature=0.5, epsilon=0.2, epsilon_policy=0.03, epsilon_std=0.02, value_cost=0.7
    )
    factory = functools.partial(actor_critic, cfg=NetworkConfig(hidden_sizes=(6,)))
    agent = VMPO(cfg, VECTOR, action_spec, factory, Greedy)
    params = agent.initial_params(KEY)
    rows = rows_of(agent, params)
    loss, logs = quick_jit(agent.loss)(params, rows)

    output = agent.network.apply(None, params, rows.timestep, ())[0]
    valid = [0, 1, 3, 4, 5]
    better = [0, 3, 5]  # at least the median of the five, 0.1
    scores = np.exp(rows.advantage[better] / 0.5)
    weights = scores / scores.sum()
    dual_loss = 0.5 * (0.2 + np.log(scores.mean()))
    new, old = np.asarray(output.policy, np.float64), np.asarray(rows.old_policy, np.float64)
    if action_spec is ONE_OF_4:
        log_new, log_old = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (new, old))
        chosen = log_new[range(6), rows.output.action]
        kl = (np.exp(log_old) * (log_old - log_new)).sum(-1)[valid].mean()
        penalty, duals = 5.0 * kl, 5.0 * (0.03 - kl)
    else:
        (mean, std), (old_mean, old_std) = ((x[:, :2], np.exp(x[:, 2:])) for x in (new, old))
        chosen = log_prob(rows.output.action, mean, std)
        of_mean = ((mean - old_mean) ** 2 / (2 * old_std**2))[valid].mean(0)
        of_std = (np.log(std / old_std) + old_std**2 / (2 * std**2) - 0.5)[valid].mean(0)
        penalty = of_mean.sum() + of_std.sum()
        duals = (0.03 - of_mean).sum() + (0.02 - of_std).sum()
    policy_loss = -(weights * chosen[better]).sum() + penalty
    value_loss = 0.5 * ((np.asarray(output.value) - rows.target) ** 2)[valid].mean()
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4)
    np.testing.assert_allclose(loss, policy_loss + dual_loss + duals + 0.7 * value_loss, rtol=1e-4)


def test_vmpo_learns_nothing_from_rows_without_a_transition():
    factory = functools.partial(actor_critic, cfg=NetworkConfig(hidden_sizes=(6,)))
    agent = VMPO(VMPOConfig(), VECTOR, ONE_OF_4, factory, Greedy)
    params = agent.initial_params(KEY)
    rows = rows_of(agent, params)._replace(mask=np.zeros(6, bool))
    grads, logs = quick_jit(jax.grad(agent.loss, has_aux=True))(params, rows)
    assert all(np.isfinite(x) for x in logs.values())
    assert all((x == 0).all() for x in jax.tree.leaves(grads.network))


def test_the_duals_of_vmpo_may_have_an_optimizer_of_their_own():
    cfg = dataclasses.replace(SMALL_VMPO, optimizer=SGD, duals_optimizer=FAST)
    factory = functools.partial(actor_critic, cfg=NetworkConfig(hidden_sizes=(6,)))
    agent = VMPO(cfg, VECTOR, ONE_OF_4, factory, Greedy)
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    grads = jax.tree.map(jnp.ones_like, params)
    after, *_ = quick_jit(agent.apply_gradients)(params, state, grads)
    assert_close(after.network, jax.tree.map(lambda x: x - 0.5, params.network))
    difference = params.duals["temperature"] - after.duals["temperature"]
    np.testing.assert_allclose(difference, 3e-3, rtol=0.01)  # Adam's first step is its rate
    assert leaves_differ(after.duals, params.duals)


@pytest.mark.parametrize(
    ("config", "changes", "field"),
    [
        (MPOConfig, {"epsilon": 0.0}, "epsilon"),
        (MPOConfig, {"num_actions": 0}, "num_actions"),
        (MPOConfig, {"target_period": 0}, "target_period"),
        (MPOConfig, {"alpha_std": 0.0}, "alpha_std"),
        (VMPOConfig, {"temperature": float("nan")}, "temperature"),
        (VMPOConfig, {"epsilon_std": -1.0}, "epsilon_std"),
    ],
)
def test_options_out_of_range_are_refused(config, changes, field):
    with pytest.raises(ValueError, match=field):
        config(**changes)
