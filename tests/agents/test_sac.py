"""SAC: its losses by slow plain Python, temperature and targets step by step, discrete actions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.sac import SAC, SACConfig, SACOutput
from rlstack.exploration import Greedy, Sample, initial_counts
from rlstack.families.off_policy import sampling_policy
from rlstack.networks import NetworkConfig, policy_and_critic
from rlstack.types import TimeStep
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    STRUCTURED,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    quick_jit,
)
from tests.agents.linear_control import (
    DISCOUNT,
    HIGH,
    LOW,
    SGD,
    make_batch,
    moved,
    networks,
    scaled,
    unit,
    values_of,
)

SAC_SMALL = SACConfig(optimizer=FAST, temperature=0.01)
SETTINGS = {
    "sac": Setting(SAC_SMALL, VECTOR, UNEVEN),
    "sac-discrete": Setting(dataclasses.replace(SAC_SMALL, num_critics=3), MASKED, ONE_OF_4),
}

KEY = jax.random.PRNGKey(7)
ITEMS = [
    [MID, MID, MID],  # no boundary
    [FIRST, LAST, FIRST],  # a termination, then another episode
    [MID, LAST, FIRST],  # a truncation
    [LAST, FIRST, MID],  # no transition at all
]


def make(policy=Greedy, **config):
    cfg = SACConfig(**{"discount": DISCOUNT, "optimizer": SGD, "temperature": 0.5, **config})
    return SAC(cfg, VECTOR, UNEVEN, lambda *_: networks(4), policy)


def items(**changes):
    discounts = np.ones((3, 4), np.float32)
    discounts[1, 1] = 0
    return make_batch(ITEMS, SACOutput, discounts=discounts, **changes)


def drawn(weights, observation, key):
    """A squashed Gaussian's action in [-1, 1] and its log density, by definition."""
    mean, log_std = np.split(np.asarray(observation @ np.asarray(weights), np.float64), 2, axis=-1)
    log_std = np.clip(log_std, -20, 2)
    noise = np.asarray(jax.random.normal(key, mean.shape))
    raw = mean + np.exp(log_std) * noise
    log_slope = 2 * np.log(2) - 2 * np.logaddexp(raw, -raw)  # of tanh: 1 / cosh^2
    log_prob = -0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - log_std - log_slope
    return np.tanh(raw), log_prob.sum(-1)


@pytest.mark.parametrize("num_critics", [2, 3])
def test_the_three_losses_by_hand(num_critics):
    agent = make(num_critics=num_critics, target_entropy=-1.5)
    params = scaled(agent.initial_params(KEY), 0.5)._replace(log_temperature=jnp.log(0.5))
    target = agent.initial_params(jax.random.PRNGKey(8)).critics
    batch = items(weights=[1, 2, 0.5, 1])
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, target, batch)

    steps, output = batch.trajectory.timestep, batch.trajectory.agent_output
    now_key, end_key = jax.random.split(KEY)
    # Items end after two steps, one step (discount 0), one step, and one step (not counted).
    ends = steps.observation[[2, 1, 1, 1], range(4)]
    action, log_prob = drawn(params.policy, ends, end_key)
    soft = values_of(target, ends, action).min(-1) - 0.5 * log_prob
    reward = steps.reward
    goals = np.array(
        [
            reward[1, 0] + DISCOUNT * reward[2, 0] + DISCOUNT**2 * soft[0],
            reward[1, 1],
            reward[1, 2] + DISCOUNT * soft[2],
        ]
    )
    taken = values_of(params.critics, steps.observation[0], unit(output.action[0]))
    errors = goals[:, None] - taken[:3]
    critic_loss = (np.array([1, 2, 0.5])[:, None] * 0.5 * errors**2).sum() / 4
    action, log_prob = drawn(params.policy, steps.observation[0], now_key)
    opinion = values_of(params.critics, steps.observation[0], action).min(-1)
    policy_loss = (0.5 * log_prob - opinion)[:3].sum() / 4
    temperature_loss = 0.5 * (-log_prob - -1.5)[:3].sum() / 4

    np.testing.assert_allclose(logs["critic_loss"], critic_loss, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4)
    np.testing.assert_allclose(loss, critic_loss + policy_loss + temperature_loss, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*np.abs(errors).mean(-1), 0], rtol=1e-4)


def gradients(agent, params, batch):
    learner_state = agent.initial_learner_state(KEY, params)
    return quick_jit(agent.compute_gradients)(params, learner_state, batch)[0]


@pytest.mark.slow
@pytest.mark.chosen
def test_each_loss_moves_its_own_part_and_weights_count_for_the_critics():
    agent = make()
    params = agent.initial_params(KEY)
    full, silent = (gradients(agent, params, items(weights=[w] * 4)) for w in (1, 0))
    assert all(np.all(x == 0) for x in jax.tree.leaves(silent.critics))
    assert all(np.any(x != 0) for x in jax.tree.leaves(full.critics))
    assert_close(full._replace(critics=()), silent._replace(critics=()))
    # The reward does not change the gradients of the policy and the temperature.
    batch = items()
    batch.trajectory.timestep.reward[:] = 9.0
    assert_close(gradients(agent, params, batch)._replace(critics=()), full._replace(critics=()))
    nothing = make_batch([[LAST, FIRST, MID]] * 3, SACOutput)
    assert all(np.all(x == 0) for x in jax.tree.leaves(gradients(agent, params, nothing)))


@pytest.mark.parametrize(
    "learn", [True, pytest.param(False, marks=[pytest.mark.slow, pytest.mark.chosen])]
)
def test_temperature_and_target_critics_follow_their_formulas_for_three_steps(learn):
    agent = make(learn_temperature=learn, target_entropy=-0.7, target_rate=0.25)
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[MID, MID]] * 5, SACOutput)
    compute, step = quick_jit(agent.compute_gradients), quick_jit(agent.learner_step)
    log_temperature, target = np.log(0.5), state.target_critics
    assert_close(target, params.critics, atol=0, rtol=0)
    keys = []
    for _ in range(3):
        grads, _ = compute(params, state, batch)
        expected = jax.tree.map(lambda x, g: x - 0.5 * g, params.critics, grads.critics)
        now_key = jax.random.split(jax.random.split(state.rng_key)[1])[0]
        entropy = -drawn(params.policy, batch.trajectory.timestep.observation[0], now_key)[1].mean()
        params, state, output = step(params, state, batch)
        np.testing.assert_allclose(output.logs["temperature"], np.exp(log_temperature), rtol=1e-4)
        np.testing.assert_allclose(output.logs["entropy"], entropy, rtol=1e-3)
        if learn:  # too much entropy lowers the temperature
            log_temperature -= 0.5 * np.exp(log_temperature) * (entropy + 0.7)
        np.testing.assert_allclose(params.log_temperature, log_temperature, rtol=1e-3)
        assert_close(params.critics, expected)
        target = moved(target, params.critics, 0.25)
        assert_close(state.target_critics, target)
        keys.append(tuple(np.asarray(state.rng_key)))
    assert len(set(keys)) == 3


@pytest.mark.slow
@pytest.mark.chosen
def test_parts_may_have_optimizers_of_their_own():
    agent = make(
        policy_optimizer=dataclasses.replace(SGD, learning_rate=0.1),
        temperature_optimizer=dataclasses.replace(SGD, learning_rate=0.01),
    )
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    grads = gradients(agent, params, items())
    after, *_ = quick_jit(agent.learner_step)(params, state, items())
    for part, rate in (("policy", 0.1), ("log_temperature", 0.01), ("critics", 0.5)):
        old, new, grad = (getattr(tree, part) for tree in (params, after, grads))
        assert_close(new, jax.tree.map(lambda x, g, rate=rate: x - rate * g, old, grad))


def discrete(**config):
    cfg = SACConfig(**{"discount": DISCOUNT, "optimizer": SGD, "temperature": 0.5, **config})
    factory = functools.partial(policy_and_critic, cfg=NetworkConfig(hidden_sizes=(6,)))
    return SAC(cfg, MASKED, ONE_OF_4, factory, Greedy)


@pytest.mark.slow
@pytest.mark.chosen
def test_the_discrete_losses_by_enumeration_of_the_legal_actions():
    agent = discrete(target_entropy=0.3)
    params = agent.initial_params(KEY)
    target = agent.initial_params(jax.random.PRNGKey(8)).critics
    batch = make_batch([[MID, MID]] * 5, SACOutput)
    rng = np.random.default_rng(3)
    mask = rng.integers(0, 2, (2, 5, 4)).astype(np.float32)
    mask[..., 1] = 1
    observation = {"observation": batch.trajectory.timestep.observation, "action_mask": mask}
    trajectory = batch.trajectory._replace(
        timestep=batch.trajectory.timestep._replace(observation=observation),
        agent_output=SACOutput(np.ones((2, 5), np.int32)),
    )
    batch = batch._replace(trajectory=trajectory)
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, target, batch)

    def said(network, network_params, t):
        step = jax.tree.map(lambda x: x[t], trajectory.timestep)
        return np.asarray(quick_jit(network.apply)(None, network_params, step, ())[0])

    opinions = (said(agent.critics, params.critics, 0), said(agent.critics, target, 1))
    preferences = [said(agent.network.policy, params.policy, t) for t in (0, 1)]

    def judged(t, b):
        """(sum of p x least value, entropy, every critic's value of action 1)."""
        logits, values = preferences[t][b], opinions[t][b]
        legal = np.flatnonzero(mask[t, b])
        probs = np.exp(logits[legal]) / np.exp(logits[legal]).sum()
        least = values.min(0)[legal]
        return (probs * least).sum(), -(probs * np.log(probs)).sum(), values[:, 1]

    critic_loss = policy_loss = temperature_loss = 0.0
    for b in range(5):
        value, entropy, _ = judged(1, b)
        goal = trajectory.timestep.reward[1, b] + DISCOUNT * (value + 0.5 * entropy)
        value, entropy, taken = judged(0, b)
        critic_loss += 0.5 * ((goal - taken) ** 2).sum() / 5
        policy_loss -= (value + 0.5 * entropy) / 5
        temperature_loss += 0.5 * (entropy - 0.3) / 5
        np.testing.assert_allclose(priorities[b], np.abs(goal - taken).mean(), rtol=1e-4)
    np.testing.assert_allclose(logs["critic_loss"], critic_loss, rtol=1e-4)
    np.testing.assert_allclose(loss, critic_loss + policy_loss + temperature_loss, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.chosen
def test_entropies_to_keep_are_the_papers_unless_said():
    def surplus(agent):
        """The target entropy, computed from the temperature's gradient."""
        params = agent.initial_params(KEY)
        state = agent.initial_learner_state(KEY, params)
        if isinstance(agent.obs_spec, dict):
            batch = make_batch([[MID, MID]] * 4, SACOutput)
            observation = {
                "observation": batch.trajectory.timestep.observation,
                "action_mask": np.ones((2, 4, 4), np.float32),
            }
            timestep = batch.trajectory.timestep._replace(observation=observation)
            output = SACOutput(np.zeros((2, 4), np.int32))
            batch = batch._replace(
                trajectory=batch.trajectory._replace(timestep=timestep, agent_output=output)
            )
        else:
            batch = make_batch([[MID, MID]] * 4, SACOutput)
        grads, output = quick_jit(agent.compute_gradients)(params, state, batch)
        return float(output.logs["entropy"] - grads.log_temperature / 0.5)

    np.testing.assert_allclose(surplus(make()), -2.0, atol=1e-4)
    np.testing.assert_allclose(surplus(discrete()), 0.98 * np.log(4), atol=1e-4)
    np.testing.assert_allclose(surplus(make(target_entropy=0.0)), 0.0, atol=1e-4)


def test_actions_fill_the_bounds_and_are_random_at_first():
    cfg = SACConfig(random_frames=40)
    agent = make(lambda: sampling_policy(cfg, 4))
    rows = 4000
    timestep = TimeStep(
        np.ones(rows, np.int32),
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
        np.ones((rows, 3), np.float32),
    )
    far = np.zeros((3, 4), np.float32)
    far[:, 0], far[:, 1], far[:, 2:] = 9.0, -9.0, -2.0  # means out of bounds, small deviation
    params = agent.initial_params(KEY)._replace(policy=far)
    begun = initial_counts(rows)
    action = np.asarray(agent.actor_step(KEY, params, timestep, begun)[0].action)
    np.testing.assert_allclose(action.mean(0), (LOW + HIGH) / 2, atol=0.15)
    np.testing.assert_allclose(action.std(0), (HIGH - LOW) / np.sqrt(12), atol=0.05)
    later = begun._replace(env_steps=begun.env_steps + 10)  # of four environments: 40 frames
    action = np.asarray(agent.actor_step(KEY, params, timestep, later)[0].action)
    np.testing.assert_allclose(action, np.tile([2.0, 0.0], (rows, 1)), atol=1e-3)
    assert np.all(action >= LOW) and np.all(action <= HIGH)


def test_what_it_cannot_do_is_refused():
    recurrent = functools.partial(policy_and_critic, cfg=NetworkConfig(core="gru"))
    for spec in (UNEVEN, ONE_OF_4):
        with pytest.raises(ValueError, match=r"feed-forward.*network.core none.*ppo"):
            SAC(SACConfig(), VECTOR, spec, recurrent, Sample)
    pair = networks(4)
    own = pair._replace(policy=pair.policy._replace(initial_state=lambda n: jnp.zeros((n, 1))))
    with pytest.raises(ValueError, match=r"SAC: .*feed-forward"):
        SAC(SACConfig(), VECTOR, UNEVEN, lambda *_: own, Sample)
    with pytest.raises(TypeError, match="PolicyAndCritic; got Network"):
        SAC(SACConfig(), VECTOR, UNEVEN, lambda *_: pair.policy, Sample)
    for spec in (STRUCTURED, specs.Array((2,), np.float32)):
        with pytest.raises(TypeError, match="finite bounds"):
            SAC(SACConfig(), VECTOR, spec, lambda *_: pair, Sample)
    noisy = functools.partial(policy_and_critic, cfg=NetworkConfig(noisy_sigma=0.5))
    with pytest.raises(ValueError, match="noisy_sigma"):
        SAC(SACConfig(), VECTOR, UNEVEN, noisy, Sample)
    for changes in (
        {"discount": 2.0},
        {"num_critics": 0},
        {"target_rate": 0.0},
        {"temperature": 0.0},
        {"random_frames": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            SACConfig(**changes)


def test_the_entropy_to_keep_is_that_of_the_legal_actions():
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0]], np.float32)
    observation = {"observation": np.zeros((3, 3), np.float32), "action_mask": mask}
    timestep = make_batch([[MID, MID]] * 3, SACOutput).trajectory.timestep
    for scale in (1.0, 0.5):
        agent = discrete(target_entropy_scale=scale)
        found = agent._target_entropy(timestep._replace(observation=observation))
        np.testing.assert_allclose(found, scale * 0.98 * np.log([4, 2, 1]), rtol=1e-6)


def test_the_entropy_to_keep_of_continuous_actions_grows_with_their_dimensions():
    timestep = make_batch([[MID, MID]], SACOutput).trajectory.timestep
    assert make(target_entropy_scale=0.5)._target_entropy(timestep) == -1.0  # of two dimensions
    with pytest.raises(ValueError, match="target_entropy_scale must be 1 where target_entropy"):
        SACConfig(target_entropy=-1.0, target_entropy_scale=0.5)


@pytest.mark.parametrize("field", ["temperature", "target_entropy", "target_entropy_scale"])
def test_numbers_that_are_not_finite_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be finite"):
        SACConfig(**{field: float("inf")})
