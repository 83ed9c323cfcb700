"""Behaviour cloning's loss by hand, and agents that do not learn."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.bc import BC, BCConfig, BCOutput
from rlstack.agents.fixed import Random, RandomConfig, Scripted, ScriptedConfig, no_network
from rlstack.agents.rules import balance_cartpole, jump_to_high_ground, push_with_velocity
from rlstack.envs import SyncEnv
from rlstack.exploration import Greedy, Sample
from rlstack.networks import Network, NetworkConfig
from rlstack.networks.actor_critic import policy_network
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import (
    BATCH,
    FAST,
    FIRST,
    GRU,
    LAST,
    MASKED,
    MID,
    NESTED,
    ONE_OF_4,
    REAL,
    SEVERAL,
    STRUCTURED,
    VECTOR,
    Setting,
    case,
    quick_jit,
    random_timesteps,
)

SMALL_BC = BCConfig(optimizer=FAST)
RANDOM = RandomConfig()
SETTINGS = {
    "bc": Setting(SMALL_BC, VECTOR, ONE_OF_4),
    "bc-masked": Setting(SMALL_BC, MASKED, ONE_OF_4),
    "bc-several": Setting(SMALL_BC, VECTOR, SEVERAL),
    "bc-structured": Setting(SMALL_BC, NESTED, STRUCTURED),
    "bc-gru": Setting(SMALL_BC, VECTOR, REAL, GRU),
    "random-masked": Setting(RANDOM, MASKED, ONE_OF_4, learns=False, is_chance=True),
    "random-several": Setting(RANDOM, VECTOR, SEVERAL, learns=False, is_chance=True),
    "random-structured": Setting(RANDOM, VECTOR, STRUCTURED, learns=False, is_chance=True),
    "scripted": Setting(
        ScriptedConfig("tests.agent_cases:largest"), VECTOR, ONE_OF_4, learns=False
    ),
    "scripted-structured": Setting(
        ScriptedConfig("tests.agent_cases:towards"), NESTED, STRUCTURED, learns=False
    ),
}


def parrot(obs_spec, action_spec):
    """A network that returns its observations: they are the distribution's parameters."""

    def apply(rng_key, params, timestep, state):
        observation = timestep.observation
        if isinstance(observation, dict):
            observation = observation["observation"]
        return observation + params, state

    return Network(lambda rng_key: jnp.zeros(()), apply, apply, lambda batch_size: ())


def agent_of(action_spec, obs_spec=VECTOR, **changes):
    return BC(BCConfig(**changes), obs_spec, action_spec, parrot, Sample)


def batch_of(observation, action, step_type, weights=None):
    """A batch of lists [T+1][B]."""
    step_type = np.array(step_type, np.int32)
    zeros = np.zeros(step_type.shape, np.float32)
    if isinstance(observation, dict):
        observation = {name: np.array(x, np.float32) for name, x in observation.items()}
    else:
        observation = np.array(observation, np.float32)
    timestep = TimeStep(step_type, zeros, zeros, observation)
    trajectory = Transition(timestep, BCOutput(action), (), zeros.astype(np.int32))
    if weights is None:
        weights = np.ones(step_type.shape[1], np.float32)
    return Batch(trajectory, np.array(weights, np.float32))


def ln(x):
    return math.log(x)


def test_the_loss_is_the_mean_negative_log_likelihood_but_for_last_steps():
    # Logits whose softmax is (1/4, 3/4) and (4/5, 1/5).
    a, b = [0.0, ln(3)], [ln(4), 0.0]
    batch = batch_of(
        observation=[[a, b], [a, a], [b, b], [a, a]],
        action=np.array([[0, 0], [1, 1], [1, 0], [1, 1]], np.int32),
        # The second column ends at step 1 and starts again; the action at the end was ignored.
        step_type=[[FIRST, MID], [MID, LAST], [MID, FIRST], [MID, MID]],
    )
    agent = agent_of(specs.DiscreteArray(2))
    loss, logs = agent.loss(jnp.zeros(()), batch)
    # T = 3 steps, 2 columns; five actions took effect: 1/4, 3/4, 1/5 and 4/5, 4/5.
    expected = -(ln(1 / 4) + ln(3 / 4) + ln(1 / 5) + 2 * ln(4 / 5)) / 5
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(logs["accuracy"], 3 / 5, rtol=1e-6)
    entropy_a, entropy_b = (-(p * ln(p) + (1 - p) * ln(1 - p)) for p in (1 / 4, 1 / 5))
    np.testing.assert_allclose(logs["entropy"], (2 * entropy_a + 3 * entropy_b) / 5, rtol=1e-6)
    eager = agent_of(specs.DiscreteArray(2), entropy_cost=0.1)
    np.testing.assert_allclose(
        eager.loss(jnp.zeros(()), batch)[0], expected - 0.1 * logs["entropy"], rtol=1e-6
    )


def test_weights_of_items_weigh_their_steps():
    a = [0.0, ln(3)]
    batch = batch_of([[a, a], [a, a]], np.array([[0, 1], [0, 0]]), [[MID, MID]] * 2, [3.0, 1.0])
    loss, _ = agent_of(specs.DiscreteArray(2)).loss(jnp.zeros(()), batch)
    np.testing.assert_allclose(loss, -(3 * ln(1 / 4) + ln(3 / 4)) / 4, rtol=1e-6)


def test_masked_actions_take_no_part():
    row = {"observation": [0.0, 0.0, 5.0], "action_mask": [1.0, 1.0, 0.0]}
    batch = batch_of(
        {name: [[value], [value]] for name, value in row.items()},
        np.array([[0], [0]], np.int32),
        [[MID], [MID]],
    )
    loss, _ = agent_of(specs.DiscreteArray(3), MASKED).loss(jnp.zeros(()), batch)
    np.testing.assert_allclose(loss, ln(2), rtol=1e-6)


def test_several_choices_add_up():
    spec = specs.BoundedArray((2,), np.int32, [0, 1], [1, 2])
    row = [0.0, ln(3), ln(4), 0.0]  # (1/4, 3/4) for 0 and 1, (4/5, 1/5) for 1 and 2
    batch = batch_of([[row], [row]], np.array([[[1, 2]], [[0, 0]]], np.int32), [[MID], [MID]])
    loss, _ = agent_of(spec).loss(jnp.zeros(()), batch)
    np.testing.assert_allclose(loss, -ln(3 / 4) - ln(1 / 5), rtol=1e-6)


def test_real_numbers_have_the_density_of_a_gaussian_no_narrower_than_the_limit():
    spec = specs.BoundedArray((1,), np.float32, -1, 1)
    wide, narrow = [0.5, ln(2)], [0.5, -10.0]
    action = np.array([[[1.5], [0.6]], [[0.0], [0.0]]], np.float32)
    batch = batch_of([[wide, narrow]] * 2, action, [[MID, MID]] * 2)
    loss, logs = agent_of(spec, min_log_std=ln(0.1)).loss(jnp.zeros(()), batch)

    def log_density(x, mean, std):
        return -0.5 * ((x - mean) / std) ** 2 - ln(std) - 0.5 * ln(2 * math.pi)

    expected = -(log_density(1.5, 0.5, 2) + log_density(0.6, 0.5, 0.1)) / 2
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(logs["action_error"], (1.0 + 0.1) / 2, rtol=1e-5)


def test_a_structure_is_the_sum_of_its_parts():
    spec = {"aim": specs.Array((1,), np.float32), "move": specs.DiscreteArray(2)}
    row = [0.0, 0.0, 0.0, ln(3)]  # a standard normal and (1/4, 3/4)
    action = {"aim": np.ones((2, 1, 1), np.float32), "move": np.ones((2, 1), np.int32)}
    loss, _ = agent_of(spec).loss(jnp.zeros(()), batch_of([[row]] * 2, action, [[MID]] * 2))
    np.testing.assert_allclose(loss, 0.5 + 0.5 * ln(2 * math.pi) - ln(3 / 4), rtol=1e-6)


def test_what_was_done_at_the_end_of_an_episode_has_no_gradient():
    c = case("bc-gru")
    trajectory = c.batch.trajectory
    last = trajectory.timestep.step_type == LAST
    assert last[:-1].any()
    action = np.where(last[..., None], 100.0, trajectory.agent_output.action).astype(np.float32)
    other = c.batch._replace(trajectory=trajectory._replace(agent_output=BCOutput(action)))
    gradient = quick_jit(jax.grad(c.agent.loss, has_aux=True))
    for x, y in zip(
        jax.tree.leaves(gradient(c.params, c.batch)[0]),
        jax.tree.leaves(gradient(c.params, other)[0]),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_out_of_range_values_name_the_rule():
    with pytest.raises(ValueError, match="entropy_cost must be at least 0"):
        BCConfig(entropy_cost=-1.0)
    with pytest.raises(ValueError, match="module:callable"):
        ScriptedConfig("balance_cartpole")


def random_agent(action_spec, obs_spec=VECTOR):
    return Random(RandomConfig(), obs_spec, action_spec, no_network, Greedy)


def drawn(agent, obs_spec=VECTOR, batch_size=4000, observation=None):
    timestep = random_timesteps(obs_spec, np.full(batch_size, MID))
    if observation is not None:
        timestep = timestep._replace(observation=observation)
    output, _ = quick_jit(agent.actor_step)(jax.random.PRNGKey(0), (), timestep, ())
    return output.action


def test_random_choices_are_uniform_over_what_is_legal():
    counts = np.bincount(drawn(random_agent(ONE_OF_4)), minlength=4)
    np.testing.assert_allclose(counts, 1000, atol=5 * math.sqrt(750))
    several = np.asarray(drawn(random_agent(SEVERAL)))
    assert several.min(axis=0).tolist() == [0, 1]
    assert several.max(axis=0).tolist() == [2, 2]
    masks = np.tile([0, 1, 0, 1], (4000, 1)).astype(np.float32)
    observation = {"observation": np.zeros((4000, 3), np.float32), "action_mask": masks}
    legal = drawn(random_agent(ONE_OF_4, MASKED), MASKED, observation=observation)
    np.testing.assert_allclose(
        np.bincount(legal, minlength=4), [0, 2000, 0, 2000], atol=5 * math.sqrt(1000)
    )


def test_random_numbers_fill_their_bounds_or_are_normal_without():
    action = np.asarray(drawn(random_agent(specs.BoundedArray((2,), np.float32, [-1, 2], [1, 6]))))
    np.testing.assert_allclose(action.mean(axis=0), [0, 4], atol=0.15)
    assert (action >= [-1, 2]).all() and (action <= [1, 6]).all()
    np.testing.assert_allclose(action.std(axis=0), np.array([2, 4]) / math.sqrt(12), rtol=0.05)
    unbounded = np.asarray(drawn(random_agent(specs.Array((1,), np.float32))))
    np.testing.assert_allclose([unbounded.mean(), unbounded.std()], [0, 1], atol=0.1)
    parts = drawn(random_agent(STRUCTURED))
    assert abs(np.asarray(parts["aim"])).max() <= 1
    assert set(np.unique(parts["move"])) == {0, 1, 2}


def test_a_rule_that_answers_in_another_shape_is_named():
    agent = Scripted(
        ScriptedConfig("rlstack.agents.rules:balance_cartpole"), VECTOR, REAL, no_network, Sample
    )
    timestep = random_timesteps(specs.Array((4,), np.float32), np.full(BATCH, MID))
    with pytest.raises(ValueError, match="balance_cartpole must answer"):
        agent.actor_step(jax.random.PRNGKey(0), (), timestep, ())
    with pytest.raises(ValueError, match="did you mean 'balance_cartpole'"):
        Scripted(
            ScriptedConfig("rlstack.agents.rules:balance"), VECTOR, ONE_OF_4, no_network, Sample
        )


def test_rules_push_towards_the_fall_and_with_the_velocity():
    leaning = np.array([[0, 0, 0.1, 0], [0, 0, -0.1, 0], [0, 0, 0, 0.3]], np.float32)
    assert balance_cartpole(leaning).tolist() == [1, 0, 1]
    cars = np.array([[-0.5, 0.0], [-0.5, -0.01], [0.2, 0.03]], np.float32)
    assert push_with_velocity(cars).tolist() == [[1], [-1], [1]]


def test_a_policy_has_no_noisy_layers():
    with pytest.raises(ValueError, match="policy_network: noisy layers"):
        policy_network(VECTOR, ONE_OF_4, NetworkConfig(noisy_sigma=0.5))


def test_every_kind_of_action_has_a_setting():
    kinds = {str(s.action_spec) for s in SETTINGS.values() if isinstance(s.cfg, BCConfig)}
    assert kinds == {str(spec) for spec in (ONE_OF_4, SEVERAL, REAL, STRUCTURED)}


def test_the_rule_of_an_entity_game_is_always_right():
    with SyncEnv("rlstack.entity.games:FloorIsLava", 64, seed=1) as env:
        timestep = env.step(jax.tree.map(np.asarray, jump_to_high_ground(env.reset().observation)))
    assert timestep.last().all() and (timestep.reward == 1.0).all()
