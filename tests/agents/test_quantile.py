"""QR-DQN and IQN: targets and losses in slow plain Python, and the fractions that IQN uses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.iqn import IQN, IQNConfig
from rlstack.agents.qr_dqn import QRDQN, QRDQNConfig
from rlstack.exploration import EpsilonGreedy, Greedy
from rlstack.networks import Network, NetworkConfig, implicit_q_network
from tests.agent_cases import (
    FAST,
    LAST,
    MASKED,
    MID,
    NOISY,
    ONE_OF_4,
    SMALL,
    VECTOR,
    Setting,
    assert_close,
    quick_jit,
    random_timesteps,
)
from tests.agents.test_dqn import make_batch
from tests.math.test_value_distributions import slow_quantile_loss

QR_ABSOLUTE = QRDQNConfig(optimizer=FAST, double=False, huber_delta=0.0)
FIVE_ATOMS = dataclasses.replace(SMALL, num_atoms=5)
IQN_SMALL = IQNConfig(
    optimizer=FAST, num_acting_fractions=4, num_fractions=8, num_target_fractions=6
)
IQN_SINGLE = dataclasses.replace(IQN_SMALL, double=False)
SETTINGS = {
    "qr-dqn": Setting(QRDQNConfig(optimizer=FAST), VECTOR, ONE_OF_4, FIVE_ATOMS),
    "qr-dqn-masked": Setting(
        QR_ABSOLUTE, MASKED, ONE_OF_4, dataclasses.replace(FIVE_ATOMS, duelling=True)
    ),
    "iqn": Setting(IQN_SMALL, VECTOR, ONE_OF_4, dataclasses.replace(SMALL, num_cosines=6)),
    "iqn-noisy": Setting(IQN_SINGLE, MASKED, ONE_OF_4, dataclasses.replace(NOISY, num_cosines=6)),
}

KEY = jax.random.PRNGKey(0)
N = 3
ONLINE, TARGET = (
    np.random.default_rng(seed).normal(size=(3, 4, N)).astype(np.float32) for seed in (1, 0)
)
BATCH = make_batch([[MID, MID, MID], [MID, LAST, MID], [LAST, MID, MID], [MID, MID, MID]])
WEIGHTS = np.array([1, 0.5, 2, 0.25], np.float32)


def linear(params, observation):
    return np.einsum("bi,ian->ban", observation, params)


def make_qr(**config):
    def apply(key, params, timestep, state):
        return jnp.einsum("bi,ian->ban", timestep.observation, params), state

    network = Network(lambda key: ONLINE, apply, apply, lambda batch_size: ())
    cfg = QRDQNConfig(**{"discount": 0.9, **config})
    return QRDQN(cfg, VECTOR, ONE_OF_4, lambda *_: network, Greedy)


def ends():
    """The rewards, discounts and observations at the ends of the items of `BATCH`."""
    timestep = BATCH.trajectory.timestep
    reward = timestep.reward[1] + 0.9 * timestep.reward[2]
    reward[1] = timestep.reward[1, 1]
    observation = timestep.observation[2].copy()
    observation[1] = timestep.observation[1, 1]
    return reward, np.array([0.81, 0.0, 0.0, 0.81]), observation


@pytest.mark.parametrize(("double", "delta"), [(False, 1.0), (True, 0.0)])
def test_qr_dqn_by_hand(double, delta):
    agent = make_qr(double=double, huber_delta=delta)
    weighted = BATCH._replace(weights=WEIGHTS)
    loss, (_, priorities) = quick_jit(agent.loss)(KEY, ONLINE, TARGET, weighted)
    reward, discount, observation = ends()
    after = linear(TARGET, observation)
    best = (linear(ONLINE, observation) if double else after).mean(-1).argmax(-1)
    before = linear(ONLINE, BATCH.trajectory.timestep.observation[0])
    losses, errors = np.zeros(4), np.zeros(4)
    for i in (0, 1, 3):  # item 2 begins at an end
        quantiles = before[i, BATCH.trajectory.agent_output.action[0, i]]
        targets = reward[i] + discount[i] * after[i, best[i]]
        losses[i] = slow_quantile_loss(quantiles, [1 / 6, 3 / 6, 5 / 6], targets, delta)
        errors[i] = abs(targets.mean() - quantiles.mean())
    np.testing.assert_allclose(priorities, errors, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, (WEIGHTS * losses).mean(), rtol=1e-4)


def make_iqn(policy=Greedy, **config):
    """An IQN whose quantiles are linear action values times (1 + fraction)."""

    def apply(key, params, timestep, state):
        observation, fractions = timestep.observation
        values = jnp.einsum("bi,ia->ba", observation, params)
        return values[..., None] * (1 + fractions[:, None]), state

    network = Network(lambda key: ONLINE[..., 0], apply, apply, lambda batch_size: ())
    cfg = IQNConfig(**{"discount": 0.9, "num_fractions": 5, "num_target_fractions": 4, **config})
    return IQN(cfg, VECTOR, ONE_OF_4, lambda *_: network, policy)


@pytest.mark.parametrize("double", [False, True])
def test_iqn_by_hand_with_the_fractions_it_drew(double):
    agent, drawn = make_iqn(double=double), []

    class Spy(IQN):
        def quantiles(self, rng_key, params, timestep, fractions):
            drawn.append(np.asarray(fractions))
            return super().quantiles(rng_key, params, timestep, fractions)

    spy = Spy(*agent._arguments)
    online, target = ONLINE[..., 0], TARGET[..., 0]
    weighted = BATCH._replace(weights=WEIGHTS)
    loss, (_, priorities) = spy.loss(KEY, online, target, weighted)
    by_size = {fractions.shape[1]: fractions for fractions in drawn}
    learned, choosing, targeted = by_size[5], by_size[32], by_size[4]
    assert len(drawn) == 3 and np.ptp(choosing, axis=0).max() == 0  # one draw for all rows
    assert np.ptp(learned, axis=0).min() > 0 and np.ptp(targeted, axis=0).min() > 0

    reward, discount, observation = ends()
    after = observation @ target
    # 1 + fraction is positive and the same for all actions, so the best action is unchanged.
    best = (observation @ online if double else after).argmax(-1)
    before = BATCH.trajectory.timestep.observation[0] @ online
    losses, errors = np.zeros(4), np.zeros(4)
    for i in (0, 1, 3):
        quantiles = before[i, BATCH.trajectory.agent_output.action[0, i]] * (1 + learned[i])
        targets = reward[i] + discount[i] * after[i, best[i]] * (1 + targeted[i])
        losses[i] = slow_quantile_loss(quantiles, learned[i], targets, 1.0)
        errors[i] = abs(targets.mean() - quantiles.mean())
    np.testing.assert_allclose(priorities, errors, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, (WEIGHTS * losses).mean(), rtol=1e-4)


@pytest.mark.parametrize("agent", [make_qr(), make_iqn()])
def test_gradients_do_not_pass_through_targets(agent):
    online = agent.initial_params(KEY)
    gradient = jax.grad(agent.loss, argnums=2, has_aux=True)(KEY, online, 2 * online, BATCH)[0]
    assert np.all(gradient == 0)


@pytest.mark.slow
@pytest.mark.chosen
def test_fractions_are_drawn_anew_with_every_update_and_every_step():
    network = functools.partial(
        implicit_q_network, cfg=NetworkConfig(hidden_sizes=(8,), num_cosines=6)
    )
    cfg = IQNConfig(num_fractions=2, num_target_fractions=2, num_acting_fractions=2)
    agent = IQN(cfg, VECTOR, ONE_OF_4, network, functools.partial(EpsilonGreedy, 0.0))
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    compute, values = quick_jit(agent.compute_gradients), quick_jit(agent.action_values)
    first = compute(params, state, BATCH)[1].logs["loss"]
    moved = agent.update_learner_state(params, state, state.opt_state)
    assert compute(params, state, BATCH)[1].logs["loss"] == first
    assert compute(params, moved, BATCH)[1].logs["loss"] != first
    step = random_timesteps(VECTOR, np.ones(3))
    draws = [np.asarray(values(jax.random.PRNGKey(i), params, step)) for i in (0, 0, 1)]
    assert_close(draws[0], draws[1], atol=0, rtol=0)
    assert np.abs(draws[0] - draws[2]).max() > 1e-4


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (QRDQNConfig, "huber_delta"),
        (IQNConfig, "huber_delta"),
        (IQNConfig, "num_fractions"),
        (IQNConfig, "num_target_fractions"),
        (IQNConfig, "num_acting_fractions"),
    ],
)
def test_configs_out_of_range_are_refused(config, name):
    with pytest.raises(ValueError, match=f"{config.__name__}: {name}"):
        config(**{name: -1})


@pytest.mark.parametrize("config", [DQNConfig, QRDQNConfig, IQNConfig])
def test_an_infinite_delta_is_refused(config):
    with pytest.raises(ValueError, match="huber_delta must be finite"):
        config(huber_delta=float("inf"))
