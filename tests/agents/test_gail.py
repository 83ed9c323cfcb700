"""GAIL and SQIL: rewards, and the discriminator's loss by plain numpy."""

import functools

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.gail import GAIL, GAILConfig
from rlstack.agents.sac import SAC, SACConfig, SACOutput
from rlstack.agents.sqil import SQIL, SQILConfig
from rlstack.exploration import Greedy
from rlstack.networks import NetworkConfig, policy_and_critic
from rlstack.optimizers import OptimizerConfig
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Case,
    Setting,
    quick_jit,
    random_timesteps,
)
from tests.agents.linear_control import DISCOUNT, SGD, make_batch, networks, unit

# In the contract's tests rewards hardly change, so that errors may fall.
STILL = GAILConfig(
    optimizer=FAST, temperature=0.01, discriminator=OptimizerConfig(learning_rate=1e-6)
)
SMALL_SQIL = SQILConfig(optimizer=FAST, temperature=0.01)
SETTINGS = {
    "gail": Setting(STILL, VECTOR, UNEVEN),
    "gail-discrete": Setting(STILL, MASKED, ONE_OF_4),
    "sqil": Setting(SMALL_SQIL, VECTOR, UNEVEN),
    "sqil-discrete": Setting(SMALL_SQIL, MASKED, ONE_OF_4),
}

KEY = jax.random.PRNGKey(7)
ITEMS = [[MID, MID, MID], [FIRST, LAST, FIRST], [LAST, FIRST, MID], [MID, MID, LAST]]
SHOWN = np.array([False, True, True, True])


def made(kind, cfg, **config):
    cfg = cfg(**{"discount": DISCOUNT, "optimizer": SGD, "temperature": 0.5, **config})
    return kind(cfg, VECTOR, UNEVEN, lambda *_: networks(4), Greedy)


def items():
    return make_batch(ITEMS, SACOutput)._replace(demonstrated=SHOWN)


@pytest.mark.parametrize("reward", [1.0, 2.0])
def test_sqil_is_sac_with_a_reward_for_each_demonstrated_step(reward):
    agent, base = made(SQIL, SQILConfig, demonstration_reward=reward), made(SAC, SACConfig)
    params = base.initial_params(KEY)
    batch = items()
    rewards = np.zeros((3, 4), np.float32)
    rewards[:, 1:] = reward
    rewards[0, 1] = rewards[2, 1] = rewards[1, 2] = 0  # FIRST has no reward
    known = batch.trajectory.timestep._replace(reward=rewards)
    judged = batch._replace(trajectory=batch.trajectory._replace(timestep=known))
    found = quick_jit(agent.loss)(KEY, params, params.critics, batch)
    expected = quick_jit(base.loss)(KEY, params, params.critics, judged)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1][1], expected[1][1], rtol=1e-6)


def linear_discriminator(batch, t=0):
    """The params of one critic, and its logits of step t in plain numpy."""
    rng = np.random.default_rng(3)
    w, v = rng.normal(size=3).astype(np.float32), rng.normal(size=2).astype(np.float32)
    trajectory = batch.trajectory
    action = unit(trajectory.agent_output.action[t])
    return {"w": w, "v": v}, trajectory.timestep.observation[t] @ w + action @ v


def test_the_discriminators_loss_by_hand():
    agent, batch = made(GAIL, GAILConfig, gradient_penalty=2.0), items()
    params, logits = linear_discriminator(batch)
    loss, logs = quick_jit(agent.discriminator_loss)(params, KEY, batch)
    # Item 2 begins at the end of an episode; item 0 is the agent's own.
    probability = 1 / (1 + np.exp(-logits))
    entropy = -np.log(1 - probability[0]) - np.log(probability[[1, 3]]).mean()
    # The gradient of a linear discriminator is the same everywhere.
    norm = np.sqrt((params["w"] ** 2).sum() + (params["v"] ** 2).sum())
    np.testing.assert_allclose(logs["discriminator_loss"], entropy, rtol=1e-5)
    np.testing.assert_allclose(loss, entropy + 2.0 * (norm - 1) ** 2, rtol=1e-4)
    right = 0.5 * (logits[0] <= 0) + 0.5 * (logits[[1, 3]] > 0).mean()
    np.testing.assert_allclose(logs["discriminator_accuracy"], right)


def test_the_gradient_penalty_is_also_that_of_pixels():
    pixels = specs.BoundedArray((4, 4, 1), np.uint8, 0, 255)
    network = functools.partial(policy_and_critic, cfg=NetworkConfig(hidden_sizes=(8,)))
    agent = GAIL(GAILConfig(), pixels, ONE_OF_4, network, Greedy)
    discriminator = agent.network.critic.init(KEY)
    seen = random_timesteps(pixels, np.full(6, MID))
    action = np.arange(6, dtype=np.int32) % 4

    def penalty(discriminator):
        return agent._gradient_norm(discriminator, KEY, seen, action).sum()

    assert penalty(discriminator) > 1e-3
    moved = jax.tree.leaves(jax.grad(penalty)(discriminator))
    assert max(np.abs(x).max() for x in moved) > 0


def test_the_gradient_penalty_mixes_no_discrete_values():
    spec = {"kind": specs.DiscreteArray(3, np.uint8), "place": specs.Array((2,), np.float32)}
    network = functools.partial(policy_and_critic, cfg=NetworkConfig(hidden_sizes=(8,)))
    agent = GAIL(GAILConfig(), spec, ONE_OF_4, network, Greedy)
    kinds = []

    def logits(discriminator, timestep, action):
        kinds.append(timestep.observation["kind"].dtype)
        return timestep.observation["place"].sum(-1)

    agent.logits = logits
    seen = random_timesteps(spec, np.full(6, MID))
    norms = agent._gradient_norm((), KEY, seen, np.zeros(6, np.int32))
    np.testing.assert_allclose(norms, np.sqrt(2), rtol=1e-5)
    assert set(kinds) == {np.dtype(np.uint8)}


def test_the_discriminators_log_odds_are_the_rewards():
    agent, batch = made(GAIL, GAILConfig), items()
    params, first = linear_discriminator(batch)
    _, second = linear_discriminator(batch, t=1)
    rewards = agent.with_rewards(params, batch).trajectory.timestep.reward
    expected = np.stack([np.zeros(4), first, second])
    expected[2, 1] = expected[1, 2] = 0  # FIRST has no reward
    np.testing.assert_allclose(rewards, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "name",
    ["gail", pytest.param("gail-discrete", marks=[pytest.mark.slow, pytest.mark.chosen])],
)
def test_the_discriminator_learns_who_acted(name):
    quick = OptimizerConfig(learning_rate=1e-2)
    cfg = GAILConfig(temperature=0.01, discriminator=quick, gradient_penalty=0.1)
    c = Case(SETTINGS[name]._replace(cfg=cfg))
    params, state = c.params, c.learner_state
    batch = c.batch._replace(demonstrated=np.array([True, False, True, False]))
    learn = quick_jit(c.agent.learner_step)
    losses = []
    for _ in range(150):
        params, state, output = learn(params, state, batch)
        losses.append(float(output.logs["discriminator_loss"]))
    assert losses[-1] < losses[0]
    assert float(output.logs["discriminator_accuracy"]) == 1.0
    rewards = np.asarray(
        c.agent.with_rewards(state.discriminator, batch).trajectory.timestep.reward
    )
    assert rewards[1, [0, 2]].min() > rewards[1, [1, 3]].max()
    assert np.isfinite(rewards).all()


def test_what_they_cannot_do_is_refused():
    norm = NetworkConfig(hidden_sizes=(8,), norm="batch")
    with pytest.raises(ValueError, match="discriminator has none"):
        GAIL(GAILConfig(), VECTOR, UNEVEN, lambda *a: policy_and_critic(*a, norm), Greedy)
    with pytest.raises(ValueError, match="gradient_penalty must be at least 0"):
        GAILConfig(gradient_penalty=-1.0)
    with pytest.raises(ValueError, match="demonstration_reward must be positive"):
        SQILConfig(demonstration_reward=0.0)
