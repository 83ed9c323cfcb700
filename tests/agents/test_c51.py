"""C51 and Rainbow: targets and losses by hand, and which outputs have noise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents import AGENTS, c51
from rlstack.agents.c51 import C51, C51Config
from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.exploration import EpsilonGreedy, Greedy
from rlstack.families.q_learning import preferences
from rlstack.math.n_step import n_step
from rlstack.networks import Network, NetworkConfig, distributional_q_network, q_network
from rlstack.optimizers import OptimizerConfig
from tests import agent_cases
from tests.agent_cases import (
    FAST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    SMALL,
    VECTOR,
    Setting,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
)
from tests.agents.test_dqn import make_batch

C51_SMALL = C51Config(optimizer=FAST, target_period=1000, min_value=-4.0, max_value=4.0)
RAINBOW = dataclasses.replace(agent_cases.NOISY, duelling=True, num_atoms=7)
SETTINGS = {
    "c51": Setting(C51_SMALL, VECTOR, ONE_OF_4, dataclasses.replace(SMALL, num_atoms=7)),
    "rainbow": Setting(C51_SMALL, MASKED, ONE_OF_4, RAINBOW),
}

KEY = jax.random.PRNGKey(0)
NUM_ATOMS = 5
ATOMS = np.linspace(-2, 2, NUM_ATOMS)


def linear_network():
    """Logits that are linear in the observation, for values computed by hand."""

    def apply(key, params, timestep, state):
        return jnp.einsum("bi,ian->ban", timestep.observation, params), state

    def init(key):
        return jax.random.normal(key, (3, 4, NUM_ATOMS))

    return Network(init, apply, apply, lambda batch_size: ())


def make(policy=Greedy, **config):
    cfg = C51Config(
        **{"discount": 0.9, "min_value": -2.0, "max_value": 2.0, "max_grad_norm": 0.0, **config}
    )
    return C51(cfg, VECTOR, ONE_OF_4, lambda *_: linear_network(), policy)


ONLINE, TARGET = (
    np.random.default_rng(seed).normal(size=(3, 4, NUM_ATOMS)).astype(np.float32) for seed in (1, 0)
)


def softmax(x):
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def slow_target(reward, discount, observation, double):
    """Algorithm 1 of the paper, one atom at a time."""
    probs = softmax(np.einsum("i,ian->an", observation, TARGET))
    choosing = softmax(np.einsum("i,ian->an", observation, ONLINE)) if double else probs
    best, target = np.argmax(choosing @ ATOMS), np.zeros(NUM_ATOMS)
    for atom, prob in zip(ATOMS, probs[best], strict=True):
        place = (np.clip(reward + discount * atom, -2, 2) + 2) / 1.0
        low, high = int(np.floor(place)), int(np.ceil(place))
        target[low] += prob * (1 - (place - low))
        if high > low:
            target[high] += prob * (place - low)
    return target


BATCH = make_batch([[MID, MID, MID], [MID, MID, MID], [MID, LAST, MID], [MID, MID, LAST]])


@pytest.mark.parametrize("double", [False, True])
def test_targets_losses_and_priorities_by_algorithm_1(double):
    agent = make(double=double)
    reward, x = BATCH.trajectory.timestep.reward, BATCH.trajectory.timestep.observation
    two = reward[1] + 0.9 * reward[2]
    cases = [
        (two[0], 0.81, x[2, 0]),
        (two[1], 0.81, x[2, 1]),
        (reward[1, 2], 0.0, x[1, 2]),  # terminations end the sum and the bootstrap
        (two[3], 0.0, x[2, 3]),
    ]
    expected = np.array([slow_target(*case, double) for case in cases])
    transition = n_step(BATCH.trajectory, 0.9)
    target = agent.target_probs(KEY, ONLINE, TARGET, transition)
    np.testing.assert_allclose(target, expected, atol=1e-5)

    action = BATCH.trajectory.agent_output.action[0]
    probs = softmax(np.einsum("bi,ian->ban", x[0], ONLINE))[np.arange(4), action]
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(expected > 0, expected * np.log(expected / probs), 0)
    weighted = BATCH._replace(weights=np.array([1, 0.5, 2, 0], np.float32))
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, ONLINE, TARGET, weighted)
    np.testing.assert_allclose(priorities, terms.sum(-1), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(loss, (weighted.weights * terms.sum(-1)).mean(), rtol=1e-3)
    np.testing.assert_allclose(logs["value"], (probs @ ATOMS).mean(), rtol=1e-4)


def test_a_divergence_below_0_by_rounding_is_a_priority_of_0(monkeypatch):
    monkeypatch.setattr(c51, "categorical_kl", lambda *_: np.full(4, -1e-7, np.float32))
    _, (_, priorities) = make().loss(KEY, ONLINE, TARGET, BATCH)
    np.testing.assert_array_equal(priorities, 0.0)


def test_acting_takes_the_largest_mean():
    step = random_timesteps(VECTOR, np.ones(6))
    action = make().actor_step(KEY, ONLINE, step, make().initial_state(6))[0].action
    means = softmax(np.einsum("bi,ian->ban", step.observation, ONLINE)) @ ATOMS
    np.testing.assert_array_equal(action, means.argmax(-1))


def test_items_that_begin_at_an_end_teach_nothing_and_targets_pass_no_gradient():
    agent = make()
    ends = make_batch([[LAST, MID, MID]] * 2)
    state = agent.initial_learner_state(KEY, TARGET)
    grads, output = quick_jit(agent.compute_gradients)(ONLINE, state, ends)
    assert np.all(grads == 0) and np.all(output.priorities == 0)
    gradient = quick_jit(jax.grad(agent.loss, argnums=2, has_aux=True))(KEY, ONLINE, TARGET, BATCH)
    assert np.all(gradient[0] == 0)


def test_the_target_and_the_key_move_with_every_update():
    agent = make(target_period=2, optimizer=OptimizerConfig(name="sgd", learning_rate=0.5))
    learn = quick_jit(agent.learner_step)
    params, state = jnp.asarray(ONLINE), agent.initial_learner_state(KEY, jnp.asarray(TARGET))
    keys, targets = [state.rng_key], [TARGET]
    for update in range(1, 4):
        params, state, _ = learn(params, state, BATCH)
        targets.append(np.asarray(params) if update == 2 else targets[-1])
        np.testing.assert_allclose(state.target_params, targets[-1], rtol=1e-6)
        keys.append(state.rng_key)
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 4


NOISY = NetworkConfig(hidden_sizes=(8,), noisy_sigma=0.5, duelling=True, num_atoms=NUM_ATOMS)


DEFAULT = C51Config()


def noisy(policy, agent=C51, cfg=DEFAULT, network=distributional_q_network, spec=VECTOR):
    own = NOISY if agent is C51 else dataclasses.replace(NOISY, num_atoms=51)
    return agent(cfg, spec, ONE_OF_4, functools.partial(network, cfg=own), policy)


def without_noise(params):
    return {
        name: {key: 0 * x if "sigma" in key else x for key, x in module.items()}
        for name, module in params.items()
    }


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("agent", "cfg", "network"),
    [(C51, C51Config(), distributional_q_network), (DQN, DQNConfig(), q_network)],
)
def test_noise_explores_and_greedy_evaluation_is_by_the_mean_weights(agent, cfg, network):
    exploring = noisy(functools.partial(EpsilonGreedy, 0.0), agent, cfg, network)
    judged = noisy(Greedy, agent, cfg, network)
    params = exploring.initial_params(KEY)
    step, state = random_timesteps(VECTOR, np.ones(64)), judged.initial_state(64)
    keys = [jax.random.PRNGKey(i) for i in range(4)]

    def actions(agent, params):
        act = quick_jit(agent.actor_step)
        return [np.asarray(act(key, params, step, state)[0].action) for key in keys]

    greedy = actions(judged, params)
    assert not leaves_differ(greedy[1:], greedy[:-1])
    assert leaves_differ(*actions(exploring, params)[:2])
    assert not leaves_differ(actions(exploring, without_noise(params)), greedy)


@pytest.mark.slow
@pytest.mark.chosen
def test_learning_draws_noise_for_the_online_the_target_and_the_choosing_network():
    agent = noisy(functools.partial(EpsilonGreedy, 0.0), spec=VECTOR)
    params, target = agent.initial_params(KEY), agent.initial_params(jax.random.PRNGKey(1))
    loss = quick_jit(agent.loss)

    def varies(params, target):
        keys = (jax.random.PRNGKey(i) for i in range(3))
        return len({float(loss(key, params, target, BATCH)[0]) for key in keys}) > 1

    quiet, still = without_noise(params), without_noise(target)
    assert varies(params, still) and varies(quiet, target)
    assert not varies(quiet, still)
    # The network that chooses actions draws separate noise: the same params give other values.
    choosing, drawn = [], agent.outputs

    class Spy(C51):
        def outputs(self, rng_key, *rest):
            choosing.append(tuple(np.asarray(rng_key).tolist()))
            return drawn(rng_key, *rest)

    noisy(Greedy, Spy).loss(KEY, params, target, BATCH)
    assert len(choosing) == len(set(choosing)) == 3


@pytest.mark.slow
@pytest.mark.chosen
def test_noise_grows_and_shrinks_by_gradients():
    agent = noisy(Greedy)
    params = agent.initial_params(KEY)
    grads = quick_jit(jax.grad(agent.loss, argnums=1, has_aux=True))(KEY, params, params, BATCH)[0]
    found = {key for module in grads.values() for key, x in module.items() if np.any(x != 0)}
    assert {"w", "b", "w_sigma", "b_sigma"} <= found


def test_rainbow_of_masked_actions_bootstraps_from_legal_ones_alone():
    agent = noisy(Greedy, spec=MASKED)
    params = agent.initial_params(KEY)
    end = random_timesteps(MASKED, np.ones(16))
    best = preferences(agent.action_values(KEY, params, end), end).mode()
    assert np.take_along_axis(end.observation["action_mask"], best[:, None], -1).all()


def test_what_it_cannot_do_is_refused_and_its_policy_is_epsilon_greedy():
    with pytest.raises(ValueError, match="min_value"):
        C51Config(min_value=1.0, max_value=1.0)
    for changes in ({"epsilon_end": 2.0}, {"epsilon_frames": 0}, {"discount": -0.1}):
        with pytest.raises(ValueError, match=f"C51Config: {next(iter(changes))}"):
            dataclasses.replace(C51Config(), **changes)
    recurrent = functools.partial(distributional_q_network, cfg=NetworkConfig(core="gru"))
    with pytest.raises(ValueError, match=r"C51.*feed-forward"):
        C51(C51Config(), VECTOR, ONE_OF_4, recurrent, Greedy)
    cfg = C51Config(epsilon_start=0.0, epsilon_end=0.0)
    policy = AGENTS[C51Config].policy(cfg, 3)
    assert np.all(np.asarray(policy.epsilon(make().initial_state(3))) == 0)
    assert_close(make().atoms(NUM_ATOMS), ATOMS.astype(np.float32))
