"""CQL: its penalties by plain numpy, for continuous and for discrete actions."""

import jax
import numpy as np
import pytest

from rlstack.agents.cql import CQL, CQLConfig, DiscreteCQL, DiscreteCQLConfig
from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.agents.sac import SAC, SACConfig, SACOutput
from rlstack.checks import ActionKindError
from rlstack.exploration import Greedy
from rlstack.families.q_learning import QOutput
from rlstack.math.n_step import n_step
from rlstack.networks import Network, policy_and_critic
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Setting,
    quick_jit,
)
from tests.agents.linear_control import DISCOUNT, SGD, make_batch, networks, unit, values_of

SETTINGS = {
    "cql": Setting(
        CQLConfig(optimizer=FAST, policy_optimizer=FAST, temperature=0.01, conservative_weight=0.1),
        VECTOR,
        UNEVEN,
    ),
    "discrete-cql": Setting(
        DiscreteCQLConfig(optimizer=FAST, target_period=1000, conservative_weight=0.1),
        MASKED,
        ONE_OF_4,
    ),
}

KEY = jax.random.PRNGKey(7)
ITEMS = [[MID, MID], [FIRST, LAST], [LAST, FIRST]]
WEIGHTS = [1, 2, 1]


def made(kind, cfg, **config):
    cfg = cfg(
        discount=DISCOUNT,
        optimizer=SGD,
        soft_targets=False,
        temperature=0.5,
        **config,
    )
    return kind(cfg, VECTOR, UNEVEN, lambda *_: networks(4), Greedy)


def squashed(policy, observation, noise):
    """A squashed Gaussian's actions in [-1, 1] and log densities, by definition."""
    mean, log_std = np.split(np.asarray(observation @ np.asarray(policy), np.float64), 2, axis=-1)
    log_std = np.clip(log_std, -20, 2)
    raw = mean + np.exp(log_std) * noise
    log_slope = 2 * np.log(2) - 2 * np.logaddexp(raw, -raw)
    return np.tanh(raw), (-0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - log_std - log_slope).sum(-1)


def test_the_loss_is_that_of_sac_and_the_penalty_by_hand():
    count = 3
    agent = made(CQL, CQLConfig, conservative_weight=4.0, num_sampled=count)
    params = agent.initial_params(KEY)
    target = agent.initial_params(jax.random.PRNGKey(8)).critics
    batch = make_batch(ITEMS, SACOutput, weights=WEIGHTS)
    loss, (logs, _) = quick_jit(agent.loss)(KEY, params, target, batch)
    penalty_key, base_key = jax.random.split(KEY)
    base, _ = quick_jit(made(SAC, SACConfig).loss)(base_key, params, target, batch)

    keys = jax.random.split(penalty_key, 3)
    first, after = batch.trajectory.timestep.observation
    uniform = jax.random.uniform(keys[0], (count, 3, 2), minval=-1.0, maxval=1.0)
    actions, densities = [np.asarray(uniform)], [np.full((count, 3), np.log(1 / 4))]
    for key, seen in ((keys[1], first), (keys[2], after)):
        noise = np.stack([jax.random.normal(k, (3, 2)) for k in jax.random.split(key, count)])
        action, density = squashed(params.policy, seen, noise)
        actions.append(action)
        densities.append(density)
    # A mean of exp(Q) / density, over nine actions.
    total = 0.0
    for action, density in zip(np.concatenate(actions), np.concatenate(densities), strict=True):
        total += np.exp(values_of(params.critics, first, action)) / np.exp(density)[:, None]
    taken = values_of(params.critics, first, unit(batch.trajectory.agent_output.action[0]))
    penalty = np.log(total / 9) - taken
    gap = (np.array(WEIGHTS[:2])[:, None] * penalty[:2]).sum() / 3
    np.testing.assert_allclose(logs["conservative_gap"], gap, rtol=1e-4)
    np.testing.assert_allclose(loss, base + 4.0 * gap, rtol=1e-4)


def test_the_penalty_estimates_the_integral_over_all_actions():
    agent = made(CQL, CQLConfig, num_sampled=4000)
    params = agent.initial_params(KEY)
    params = params._replace(policy=0.1 * params.policy)
    batch = make_batch([[MID, MID]], SACOutput)
    transition = n_step(batch.trajectory, DISCOUNT)
    found = quick_jit(agent.penalties)(KEY, params, transition)
    # The integral of exp(o w + a v) over [-1, 1]^2 is exp(o w) prod 2 sinh(v) / v.
    first = batch.trajectory.timestep.observation[0]
    w, v = np.asarray(params.critics["w"]), np.asarray(params.critics["v"])
    integral = first @ w.T + np.log(2 * np.sinh(v) / v).sum(-1)
    taken = values_of(params.critics, first, unit(batch.trajectory.agent_output.action[0]))
    np.testing.assert_allclose(found, integral - taken, atol=0.05)


def test_targets_may_leave_out_the_entropy():
    batch = make_batch(ITEMS, SACOutput)
    plain, soft = (
        SAC(
            SACConfig(discount=DISCOUNT, temperature=0.5, soft_targets=soft),
            VECTOR,
            UNEVEN,
            lambda *_: networks(4),
            Greedy,
        )
        for soft in (False, True)
    )
    params = plain.initial_params(KEY)
    (_, (_, errors)), (_, (_, with_entropy)) = (
        quick_jit(agent.loss)(KEY, params, params.critics, batch) for agent in (plain, soft)
    )
    steps, first = batch.trajectory.timestep, batch.trajectory.timestep.observation[0]
    taken = values_of(params.critics, first, unit(batch.trajectory.agent_output.action[0]))
    noise = np.asarray(jax.random.normal(jax.random.split(KEY)[1], (3, 2)))
    action, density = squashed(params.policy, steps.observation[1], noise)
    value = values_of(params.critics, steps.observation[1], action).min(-1)
    for found, entropy in ((errors, 0), (with_entropy, -density)):
        goal = steps.reward[1] + DISCOUNT * steps.discount[1] * (value + 0.5 * entropy)
        expected = np.abs(goal[:, None] - taken).mean(-1)
        np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-4)


def linear_values():
    def apply(key, params, timestep, state):
        return timestep.observation["observation"] @ params, state

    return Network(lambda key: jax.random.normal(key, (3, 4)), apply, apply, lambda batch_size: ())


def test_the_discrete_penalty_is_the_log_of_a_softmax_over_legal_actions():
    batch = make_batch(ITEMS, QOutput, weights=WEIGHTS)
    mask = np.ones((2, 3, 4), np.float32)
    mask[:, :, 3] = 0
    observation = {"observation": batch.trajectory.timestep.observation, "action_mask": mask}
    action = np.array([[0, 2, 1]] * 2, np.int32)
    trajectory = batch.trajectory._replace(
        timestep=batch.trajectory.timestep._replace(observation=observation),
        agent_output=QOutput(action),
    )
    batch = batch._replace(trajectory=trajectory)
    common = {"discount": DISCOUNT, "optimizer": SGD}
    agent, base = (
        kind(cfg, MASKED, ONE_OF_4, lambda *_: linear_values(), Greedy)
        for kind, cfg in (
            (DiscreteCQL, DiscreteCQLConfig(conservative_weight=3.0, **common)),
            (DQN, DQNConfig(**common)),
        )
    )
    params, target = (jax.random.normal(jax.random.PRNGKey(i), (3, 4)) for i in (1, 2))
    loss, (logs, _) = quick_jit(agent.loss)(KEY, params, target, batch)
    plain, _ = quick_jit(base.loss)(KEY, params, target, batch)
    values = (observation["observation"][0] @ np.asarray(params))[:, :3]
    gaps = np.log(np.exp(values).sum(-1)) - values[range(3), action[0]]
    gap = (np.array(WEIGHTS[:2]) * gaps[:2]).sum() / 3
    np.testing.assert_allclose(logs["conservative_gap"], gap, rtol=1e-5)
    np.testing.assert_allclose(loss, plain + 3.0 * gap, rtol=1e-5)


def test_the_kinds_of_actions_are_told_apart():
    with pytest.raises(ActionKindError, match="Use DiscreteCQL"):
        CQL(CQLConfig(), MASKED, ONE_OF_4, policy_and_critic, Greedy)
    with pytest.raises(ValueError, match="conservative_weight must be at least 0"):
        DiscreteCQLConfig(conservative_weight=-1.0)
