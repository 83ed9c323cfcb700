"""Normalisation around agents: the inputs of the inner agent, and when statistics change."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rlstack.agent import EpochAgent
from rlstack.agents.dqn import DQN
from rlstack.agents.fixed import Random, RandomConfig, no_network
from rlstack.agents.ppo import PPO
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.exploration import Greedy, Sample
from rlstack.families.normalised import Normalised, NormalisedEpochs, Statistics, normalised
from rlstack.math.running_statistics import RunningStatistics
from rlstack.networks import actor_critic, q_network
from tests.agent_cases import (
    FIRST,
    LAST,
    MASKED,
    MID,
    ONE_OF_4,
    SMALL,
    VECTOR,
    Case,
    Setting,
    acted_batch,
    assert_close,
    case,
    quick_jit,
    random_timesteps,
    step_types,
)
from tests.agents.test_dqn import DQN_SMALL
from tests.agents.test_ppo import PPO_SMALL

DISCOUNT = 0.9
ALL = NormalisationConfig(
    observations=True, rewards="return", return_discount=DISCOUNT, reward_scale=2.0, reward_clip=1.5
)
MOMENTS = Statistics(
    RunningStatistics(
        np.float32(10), [np.array([1.0, -2.0, 0.5], np.float32)], [np.array([4.0, 0.25, 1.0], "f4")]
    ),
    RunningStatistics(np.float32(10), [np.float32(3.0)], [np.float32(16.0)]),
)


def plain(kind, obs_spec=VECTOR):
    cfg, make, network, policy = {
        "ppo": (PPO_SMALL, PPO, actor_critic, Sample),
        "dqn": (DQN_SMALL, DQN, q_network, Greedy),
    }[kind]
    return make(cfg, obs_spec, ONE_OF_4, functools.partial(network, cfg=SMALL), policy)


def data(agent, params, step_type, seed=0):
    """A batch with actions of this agent, and its state."""
    c = Case(Setting(agent.cfg, agent.obs_spec, ONE_OF_4))
    c.agent, c.act = agent, quick_jit(agent.actor_step)
    return acted_batch(c, params, step_type, seed)


def by_hand(timestep):
    """The expected result of `ALL` with `MOMENTS`."""
    observation = (timestep.observation - [1.0, -2.0, 0.5]) / [2.0, 0.5, 1.0]
    reward = np.clip(timestep.reward * 2.0 / 4.0, -1.5, 1.5)
    return timestep._replace(
        observation=np.clip(observation, -10, 10).astype("f4"), reward=reward.astype("f4")
    )


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_the_agent_inside_learns_from_what_is_shown_to_it(kind):
    inside = plain(kind)
    agent = normalised(inside, ALL)
    assert isinstance(agent, EpochAgent) == (kind == "ppo")
    key = jax.random.PRNGKey(0)
    params = agent.initial_params(key)._replace(statistics=MOMENTS)
    state = agent.initial_learner_state(key, params)
    batch = data(agent, params, step_types())
    shown = batch.trajectory._replace(
        timestep=by_hand(batch.trajectory.timestep),
        agent_state=batch.trajectory.agent_state.agent,
    )
    expected = quick_jit(inside.learner_step)(
        params.agent, state.agent, batch._replace(trajectory=shown)
    )
    new_params, new_state, output = quick_jit(agent.learner_step)(params, state, batch)
    assert_close((new_params.agent, new_state.agent, output), expected)
    assert_close(new_params.statistics, new_state.pending)


def test_centred_rewards_lose_their_mean_but_not_those_of_first_steps():
    """With mean 3, deviation 4 and factor 2, a reward of 7 is 2 (7 - 3) / 4 = 2."""
    cfg = NormalisationConfig(rewards="centred", reward_scale=2.0)
    agent = normalised(plain("dqn"), cfg)
    assert not agent.has_values
    timestep = random_timesteps(VECTOR, [MID, FIRST, LAST, MID])
    timestep = timestep._replace(reward=np.array([7.0, 0.0, 3.0, -1.0], np.float32))
    shown = agent._seen(MOMENTS, timestep)
    np.testing.assert_allclose(shown.reward, [2.0, 0.0, 0.0, -2.0], atol=1e-6)
    np.testing.assert_array_equal(shown.observation, timestep.observation)


def test_acting_sees_the_statistics_of_its_params_and_counts_returns():
    inside = plain("ppo")
    agent = normalised(inside, ALL)
    key = jax.random.PRNGKey(0)
    params = agent.initial_params(key)._replace(statistics=MOMENTS)
    timestep = random_timesteps(VECTOR, [MID, FIRST, LAST, MID])
    state = agent.initial_state(4)._replace(discounted_return=np.array([1.0, 7.0, -1.0, 0.0], "f4"))
    state = agent.reset_state(state, timestep.first())
    np.testing.assert_array_equal(state.discounted_return, [1.0, 0.0, -1.0, 0.0])
    output, after = agent.actor_step(key, params, timestep, state)
    expected, _ = inside.actor_step(key, params.agent, by_hand(timestep), ())
    assert_close(output, expected)
    kept = np.array([1.0, 0.0, -1.0, 0.0]) * DISCOUNT + timestep.reward
    np.testing.assert_allclose(after.discounted_return, kept, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
def test_statistics_stand_still_while_a_batch_is_learned_and_join_the_params_after():
    agent = normalised(plain("ppo"), ALL)
    assert isinstance(agent, NormalisedEpochs)
    key = jax.random.PRNGKey(0)
    params = agent.initial_params(key)
    state = agent.initial_learner_state(key, params)
    batches = [data(agent, params, step_types(), seed) for seed in (1, 2)]
    prepared, rows, _ = agent.prepare(params, state, batches[0])
    between, _, _ = quick_jit(agent.update)(params, prepared, rows)
    assert_close(between.statistics, params.statistics, 0, 0)
    learn = quick_jit(agent.learner_step)
    for batch in batches:
        params, state, _ = learn(params, state, batch)
    seen = np.concatenate([b.trajectory.timestep.observation[:-1] for b in batches])
    seen = seen.reshape((-1, 3))
    found = params.statistics.observation
    assert found.num_seen == len(seen) == 40
    np.testing.assert_allclose(found.mean[0], seen.mean(0), atol=1e-6)
    np.testing.assert_allclose(found.variance[0], seen.var(0), rtol=1e-5)
    steps = [jax.tree.map(lambda x: x[1:], b.trajectory) for b in batches]
    returns = np.concatenate(
        [
            (s.agent_state.discounted_return * DISCOUNT + s.timestep.reward)[
                s.timestep.step_type != FIRST
            ]
            for s in steps
        ]
    )
    found = params.statistics.reward
    assert found.num_seen == len(returns) == 40 - 2
    np.testing.assert_allclose(found.variance[0], returns.var(), rtol=1e-4)
    # Acting and learning use the same statistics, so the KL divergence is 0.
    acted = data(agent, params, step_types(), seed=3)
    rows = agent.prepare(params, state, acted)[1]
    _, logs = agent.agent.loss(params.agent, rows)
    assert abs(logs["kl"]) < 1e-6


@pytest.mark.parametrize("rewards", ["reward", "return"])
def test_items_of_one_step_count_the_reward_at_the_end_of_an_episode(rewards):
    agent = normalised(plain("dqn"), NormalisationConfig(rewards=rewards))
    params = agent.initial_params(jax.random.PRNGKey(0))
    state = agent.initial_learner_state(jax.random.PRNGKey(0), params)
    batch = data(agent, params, np.array([[MID, FIRST, MID, MID], [LAST, MID, LAST, MID]]))
    reward = np.array([[5.0] * 4, [1.0, 0.0, 1.0, 0.0]], np.float32)
    trajectory = batch.trajectory
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(reward=reward))
    if rewards == "return":
        fresh = trajectory.agent_state._replace(discounted_return=np.zeros((2, 4), np.float32))
        trajectory = trajectory._replace(agent_state=fresh)
    params, _, _ = quick_jit(agent.learner_step)(
        params, state, batch._replace(trajectory=trajectory)
    )
    found = params.statistics.reward
    assert found.num_seen == 4 and found.variance[0] == 0.25


@pytest.mark.parametrize("rewards", ["reward", "return"])
def test_the_first_step_of_an_episode_has_no_reward_to_count(rewards):
    """Whatever number stands there: some environments leave one."""
    agent = normalised(plain("dqn"), NormalisationConfig(rewards=rewards))
    params = agent.initial_params(jax.random.PRNGKey(0))
    state = agent.initial_learner_state(jax.random.PRNGKey(0), params)
    batch = data(agent, params, np.array([[MID, LAST, LAST, MID], [MID, FIRST, FIRST, LAST]]))
    reward = np.array([[5.0] * 4, [1.0, 100.0, -40.0, 4.0]], np.float32)
    trajectory = batch.trajectory
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(reward=reward))
    if rewards == "return":
        fresh = trajectory.agent_state._replace(discounted_return=np.zeros((2, 4), np.float32))
        trajectory = trajectory._replace(agent_state=fresh)
    state, _ = agent._take(params, state, batch._replace(trajectory=trajectory))
    found = state.pending.reward
    assert (found.num_seen, found.mean[0], found.variance[0]) == (2, 2.5, 2.25)


def test_the_largest_return_stays_within_the_limit():
    """Of returns 30 * 0.5 + 5 = 20 and 2 * 0.5 - 6 = -5 the largest is 20, so 5 / 20 limits the
    factor. The reward of 100 at the start of an episode is not counted, as in the statistics."""
    cfg = NormalisationConfig(rewards="return", return_discount=0.5, return_limit=5.0)
    agent = normalised(plain("dqn"), cfg)
    params = agent.initial_params(jax.random.PRNGKey(0))
    state = agent.initial_learner_state(jax.random.PRNGKey(0), params)
    batch = data(agent, params, np.array([[MID, MID, LAST], [MID, MID, FIRST]]))
    timestep = batch.trajectory.timestep._replace(reward=np.float32([[0, 0, 0], [5, -6, 100]]))
    before = np.float32([[0, 0, 0], [30, 2, 0]])
    acting = batch.trajectory.agent_state._replace(discounted_return=before)
    trajectory = batch.trajectory._replace(timestep=timestep, agent_state=acting)
    state, _ = agent._take(params, state, batch._replace(trajectory=trajectory))
    assert state.pending.largest == 20.0
    larger = state._replace(pending=state.pending._replace(largest=np.float32(50.0)))
    kept, _ = agent._take(params, larger, batch._replace(trajectory=trajectory))
    assert kept.pending.largest == 50.0
    shown = timestep._replace(reward=np.float32([8.0, -4.0, 0.0]), step_type=np.int32([MID] * 3))
    for variance, expected in ((4.0, [2.0, -1.0, 0.0]), (256.0, [0.5, -0.25, 0.0])):
        spread = RunningStatistics(np.float32(10), [np.float32(1.0)], [np.float32(variance)])
        seen = agent._seen(state.pending._replace(reward=spread), shown)
        np.testing.assert_allclose(seen.reward, expected, rtol=1e-6)


def test_rewards_that_are_all_equal_are_not_scaled():
    agent = normalised(plain("dqn"), NormalisationConfig(rewards="reward"))
    equal = RunningStatistics(np.float32(10), [np.float32(1.0)], [np.float32(0.0)])
    timestep = random_timesteps(VECTOR, [MID] * 4)
    shown = agent._seen(MOMENTS._replace(reward=equal), timestep)
    np.testing.assert_array_equal(shown.reward, timestep.reward)


def test_returns_are_discounted_along_the_stored_states():
    agent = normalised(plain("ppo"), ALL)
    params = agent.initial_params(jax.random.PRNGKey(0))
    steps = data(agent, params, step_types()).trajectory
    total = steps.agent_state.discounted_return[0]
    for t in range(6):
        total = np.where(steps.timestep.step_type[t] == FIRST, 0, total)
        np.testing.assert_allclose(steps.agent_state.discounted_return[t], total, rtol=1e-5)
        total = total * DISCOUNT + steps.timestep.reward[t]


def test_a_mask_of_floats_passes_as_it_is():
    c = case("ppo-normalised")
    params = c.params
    for seed in range(3):
        params, _, _ = c.learn(params, c.learner_state, acted_batch(c, params, step_types(), seed))
    batch = acted_batch(c, params, step_types(), seed=9)
    mask = batch.trajectory.timestep.observation["action_mask"]
    taken = np.take_along_axis(mask, batch.trajectory.agent_output.action[..., None], axis=-1)
    assert taken.all() and not mask.all()
    assert set(MASKED) == {"observation", "action_mask"}


def test_nothing_to_normalise_is_no_wrapper():
    agent = plain("dqn")
    assert normalised(agent, NormalisationConfig()) is agent
    # Configs of earlier versions have this default. Their checkpoints have no statistics.
    assert normalised(agent, NormalisationConfig(return_discount=0.99)) is agent
    only_clipped = normalised(agent, NormalisationConfig(reward_clip=1.0))
    assert isinstance(only_clipped, Normalised)
    counts = only_clipped.initial_state(2)
    assert jax.tree.structure(counts) == jax.tree.structure(agent.initial_state(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"observation_clip": 0.0},
        {"rewards": "returns"},
        {"return_discount": 1.5},
        {"reward_clip": -1.0},
        {"return_limit": -1.0, "rewards": "return"},
        {"return_limit": 5.0, "rewards": "reward"},
    ],
)
def test_configs_out_of_range_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(NormalisationConfig(), **changes)


@pytest.mark.parametrize(("own", "expected"), [(None, 0.5), (0.25, 0.25)])
def test_returns_have_the_agents_discount_unless_another_is_given(own, expected):
    cfg = dataclasses.replace(PPO_SMALL, discount=0.5)
    inside = PPO(cfg, VECTOR, ONE_OF_4, functools.partial(actor_critic, cfg=SMALL), Sample)
    agent = normalised(inside, NormalisationConfig(rewards="return", return_discount=own))
    params = agent.initial_params(jax.random.PRNGKey(0))
    state = agent.initial_state(2)._replace(discounted_return=np.float32([4.0, -2.0]))
    timestep = random_timesteps(VECTOR, [MID, MID])._replace(reward=np.float32([1.0, 10.0]))
    _, state = agent.actor_step(jax.random.PRNGKey(1), params, timestep, state)
    np.testing.assert_allclose(state.discounted_return, [1 + 4 * expected, 10 - 2 * expected])


def test_an_agent_without_a_discount_needs_one_for_returns():
    inside = Random(RandomConfig(), VECTOR, ONE_OF_4, no_network, Sample)
    with pytest.raises(ValueError, match=r"return_discount must be given .* such as Random"):
        normalised(inside, NormalisationConfig(rewards="return"))
