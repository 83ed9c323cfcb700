"""DQN: targets by hand, the target network, priorities, weights and exploration."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents import AGENTS
from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.exploration import EpsilonGreedy, Greedy
from rlstack.families.q_learning import QOutput
from rlstack.math.n_step import n_step
from rlstack.networks import Network, NetworkConfig, q_network
from rlstack.optimizers import OptimizerConfig
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    FAST,
    FIRST,
    IMAGE,
    LAST,
    MASKED,
    MID,
    NOISY,
    NORMALISED,
    ONE_OF_4,
    REAL,
    SMALL,
    VECTOR,
    Setting,
    assert_close,
    quick_jit,
)

DQN_SMALL = DQNConfig(optimizer=FAST, target_period=1000)
SINGLE = dataclasses.replace(DQN_SMALL, double=False, target_rate=0.01)
SETTINGS = {
    "dqn": Setting(DQN_SMALL, VECTOR, ONE_OF_4),
    "dqn-normalised": Setting(DQN_SMALL, VECTOR, ONE_OF_4, normalisation=NORMALISED),
    "dqn-duelling": Setting(SINGLE, MASKED, ONE_OF_4, dataclasses.replace(SMALL, duelling=True)),
    "dqn-image": Setting(DQN_SMALL, IMAGE, ONE_OF_4, dataclasses.replace(SMALL, torso="nature")),
    "dqn-noisy": Setting(DQN_SMALL, VECTOR, ONE_OF_4, NOISY),
}

KEY = jax.random.PRNGKey(0)
DISCOUNT = 0.9
SGD = OptimizerConfig(name="sgd", learning_rate=0.5)


def linear_network():
    """Action values that are linear in the observation, for values computed by hand."""

    def apply(key, params, timestep, state):
        return timestep.observation @ params, state

    return Network(lambda key: jax.random.normal(key, (3, 4)), apply, apply, lambda batch_size: ())


def make(policy=Greedy, **config):
    cfg = DQNConfig(**{"discount": DISCOUNT, "optimizer": SGD, "max_grad_norm": 0.0, **config})
    return DQN(cfg, VECTOR, ONE_OF_4, lambda *_: linear_network(), policy)


TARGET = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
ONLINE = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32) - 2 * TARGET


def targets_of(agent, batch):
    return quick_jit(agent.targets)(KEY, ONLINE, TARGET, n_step(batch.trajectory, DISCOUNT))


def gradient_of(agent, target=TARGET):
    """Returns the gradient as a function of the batch, compiled once."""
    return functools.partial(
        quick_jit(jax.grad(agent.loss, argnums=1, has_aux=True)), KEY, ONLINE, target
    )


def make_batch(step_types, discounts=None, seed=0, weights=None):
    """One item per column; `step_types` is [B][T+1]."""
    rng = np.random.default_rng(seed)
    step_type = np.array(step_types, np.int32).T
    if discounts is None:
        discounts = np.where(step_type == LAST, 0, 1).astype(np.float32)
    timestep = TimeStep(
        step_type,
        np.where(step_type == FIRST, 0, rng.normal(size=step_type.shape)).astype(np.float32),
        discounts,
        rng.normal(size=(*step_type.shape, 3)).astype(np.float32),
    )
    action = rng.integers(0, 4, step_type.shape).astype(np.int32)
    items = step_type.shape[1]
    version = np.zeros_like(step_type)
    weights = np.ones(items, np.float32) if weights is None else np.array(weights, np.float32)
    return Batch(Transition(timestep, QOutput(action), (), version), weights)


def value_of(observation, double):
    values = observation @ TARGET
    return values[np.argmax(observation @ (ONLINE if double else TARGET))]


@pytest.mark.parametrize("double", [False, True])
def test_targets_end_where_episodes_do(double):
    batch = make_batch(
        [
            [MID, MID, MID, MID],  # no boundary
            [FIRST, MID, LAST, FIRST],  # a termination inside
            [MID, LAST, FIRST, MID],  # a truncation inside
            [MID, MID, MID, LAST],  # a termination at the end
            [MID, MID, MID, LAST],  # a truncation at the end
        ]
    )
    batch.trajectory.timestep.discount[:, [2, 4]] = 1
    reward, x = batch.trajectory.timestep.reward, batch.trajectory.timestep.observation
    targets = targets_of(make(double=double), batch)
    three = reward[1] + DISCOUNT * reward[2] + DISCOUNT**2 * reward[3]
    expected = [
        three[0] + DISCOUNT**3 * value_of(x[3, 0], double),
        reward[1, 1] + DISCOUNT * reward[2, 1],
        reward[1, 2] + DISCOUNT * value_of(x[1, 2], double),
        three[3],
        three[4] + DISCOUNT**3 * value_of(x[3, 4], double),
    ]
    np.testing.assert_allclose(targets, expected, rtol=1e-5)
    assert value_of(x[3, 0], True) != value_of(x[3, 0], False)


def test_what_follows_an_episode_does_not_reach_its_target():
    batch = make_batch([[MID, LAST, FIRST, MID]])
    before = targets_of(make(), batch)
    for field in (batch.trajectory.timestep.reward, batch.trajectory.timestep.observation):
        field[2:] = 99.0
    assert_close(targets_of(make(), batch), before, atol=0, rtol=0)


def test_illegal_actions_are_not_bootstrapped_from():
    network = functools.partial(q_network, cfg=NetworkConfig(hidden_sizes=(8,)))
    agent = DQN(DQNConfig(discount=DISCOUNT), MASKED, ONE_OF_4, network, Greedy)
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    batch = make_batch([[MID, MID]] * 16)
    vectors = batch.trajectory.timestep.observation
    mask = np.zeros((2, 16, 4), np.int8)
    mask[..., 3] = 1
    timestep = batch.trajectory.timestep._replace(
        observation={"observation": vectors, "action_mask": mask}
    )
    targets = quick_jit(agent.targets)(
        KEY, params, target, n_step(batch.trajectory._replace(timestep=timestep), DISCOUNT)
    )
    after = jax.tree.map(lambda x: x[1], timestep)
    values, _ = agent.network.apply(None, target, after, ())
    np.testing.assert_allclose(targets, after.reward + DISCOUNT * values[:, 3], rtol=1e-5)


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_the_loss_is_the_weighted_mean_of_huber_losses_and_priorities_are_errors(delta):
    batch = make_batch([[MID, MID]] * 6, weights=[1, 0.5, 0, 2, 1, 1])
    agent = make(huber_delta=delta)
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, ONLINE, TARGET, batch)
    action = batch.trajectory.agent_output.action[0]
    chosen = (batch.trajectory.timestep.observation[0] @ ONLINE)[np.arange(6), action]
    error = np.abs(np.asarray(targets_of(agent, batch)) - chosen)
    np.testing.assert_allclose(priorities, error, rtol=1e-5)
    squared = 0.5 * error**2
    losses = np.where(error <= delta, squared, delta * (error - 0.5 * delta)) if delta else squared
    assert not delta or ((error > delta).any() and (error < delta).any())
    np.testing.assert_allclose(loss, (batch.weights * losses).mean(), rtol=1e-5)
    np.testing.assert_allclose(logs["loss"], loss)

    # A weight scales its item's gradient; weight 0 removes it.
    compiled = gradient_of(agent)

    def gradient(weights):
        return compiled(batch._replace(weights=np.array(weights, np.float32)))[0]

    assert_close(gradient([3, 0, 0, 0, 0, 0]), 3 * gradient([1, 0, 0, 0, 0, 0]))
    assert np.all(gradient([0] * 6) == 0)


def test_the_gradient_does_not_pass_through_the_target():
    batch = make_batch([[MID, MID]] * 2)
    gradient = gradient_of(make(), target=ONLINE)(batch)[0]
    x, action = (
        batch.trajectory.timestep.observation[0],
        batch.trajectory.agent_output.action[0],
    )
    touched = np.zeros((3, 4), bool)
    touched[:, action] = True
    assert np.all((np.asarray(gradient) != 0) == touched)
    assert np.abs(x).min() > 0


def test_an_item_that_begins_at_the_end_of_an_episode_teaches_nothing():
    batch = make_batch([[LAST, FIRST, MID]])
    agent = make()
    state = agent.initial_learner_state(jax.random.PRNGKey(0), TARGET)
    grads, output = quick_jit(agent.compute_gradients)(ONLINE, state, batch)
    assert np.all(grads == 0) and output.priorities == 0


@pytest.mark.parametrize("config", [{"target_period": 2}, {"target_rate": 0.25}])
def test_the_target_follows_by_period_or_by_rate(config):
    agent = make(huber_delta=0.0, **config)
    params = jnp.asarray(ONLINE)
    state = agent.initial_learner_state(jax.random.PRNGKey(0), params)
    target = np.asarray(params)
    batch = make_batch([[MID, MID]] * 3)
    compute, learn = quick_jit(agent.compute_gradients), quick_jit(agent.learner_step)
    for update in range(1, 4):
        grads, _ = compute(params, state, batch)
        expected = np.asarray(params) - 0.5 * np.asarray(grads)
        params, state, _ = learn(params, state, batch)
        np.testing.assert_allclose(params, expected, rtol=1e-5)
        if "target_rate" in config:
            target = 0.75 * target + 0.25 * np.asarray(params)
        elif update == 2:
            target = np.asarray(params)
        np.testing.assert_allclose(state.target_params, target, rtol=1e-5)
        assert state.num_updates == update


def test_gradients_are_clipped_by_their_global_norm():
    batch = make_batch([[MID, MID]] * 3)
    params = jnp.asarray(ONLINE)
    agent = make(huber_delta=0.0, max_grad_norm=0.01)
    state = agent.initial_learner_state(jax.random.PRNGKey(0), jnp.asarray(TARGET))
    moved, _, output = quick_jit(agent.learner_step)(params, state, batch)
    np.testing.assert_allclose(np.linalg.norm(moved - params), 0.5 * 0.01, rtol=1e-3)
    assert output.logs["grad_norm"] > 0.01


def test_epsilon_falls_over_the_frames_of_all_environments_and_survives_episodes():
    cfg = DQNConfig(epsilon_start=1.0, epsilon_end=0.0, epsilon_frames=40)
    seen = []
    policy = AGENTS[DQNConfig].policy(cfg, 4)
    assert isinstance(policy, EpsilonGreedy)

    def spy():
        def act(key, distribution, counts):
            seen.append(np.asarray(policy.epsilon(counts)))
            return distribution.mode()

        return act

    agent = make(spy)
    state = agent.initial_state(2)
    column_1 = [FIRST, MID, LAST, FIRST, MID, MID]
    for kind in column_1:
        step_type = np.array([FIRST if not seen else MID, kind], np.int32)
        state = agent.reset_state(state, step_type == FIRST)
        step = TimeStep(step_type, np.zeros(2), np.ones(2), np.zeros((2, 3), np.float32))
        _, state = agent.actor_step(jax.random.PRNGKey(0), jnp.asarray(ONLINE), step, state)
    # Four environments make 4 frames per step; the action at LAST makes no frame.
    np.testing.assert_allclose(np.array(seen)[:, 0], 1 - 0.1 * np.arange(6), atol=1e-6)
    np.testing.assert_allclose(np.array(seen)[:, 1], [1.0, 0.9, 0.8, 0.8, 0.7, 0.6], atol=1e-6)
    assert np.asarray(state.episodes).tolist() == [0, 1]


def test_what_it_cannot_do_is_refused():
    recurrent = functools.partial(q_network, cfg=NetworkConfig(core="gru"))
    with pytest.raises(ValueError, match=r"feed-forward.*ppo"):
        DQN(DQNConfig(), VECTOR, ONE_OF_4, recurrent, Greedy)
    with pytest.raises(TypeError, match=r"one discrete choice.*ppo"):
        DQN(DQNConfig(), VECTOR, REAL, q_network, Greedy)
    for changes in ({"discount": 2.0}, {"target_rate": -1.0}, {"target_period": 0}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            dataclasses.replace(DQNConfig(), **changes)
