"""IQL and AWAC: their losses by plain numpy, and the base that they share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.awac import AWAC, AWACConfig
from rlstack.agents.iql import IQL, IQLConfig
from rlstack.exploration import Greedy, Sample
from rlstack.families.advantage_weighted import (
    AdvantageWeightedOutput,
    imitator_and_critic,
)
from rlstack.families.off_policy import sampling_policy
from rlstack.networks import CriticConfig, NetworkConfig, PolicyAndCritic
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
    assert_close,
    quick_jit,
    random_timesteps,
)
from tests.agents.linear_control import (
    DISCOUNT,
    HIGH,
    LOW,
    SGD,
    make_batch,
    moved,
    networks,
    stateless,
    unit,
    values_of,
)

SETTINGS = {
    "iql": Setting(IQLConfig(optimizer=FAST), VECTOR, UNEVEN),
    "iql-discrete": Setting(IQLConfig(optimizer=FAST, num_critics=3), MASKED, ONE_OF_4),
    "iql-batch-norm": Setting(
        IQLConfig(optimizer=FAST), VECTOR, UNEVEN, NetworkConfig(hidden_sizes=(8,), norm="batch")
    ),
    "awac": Setting(AWACConfig(optimizer=FAST), VECTOR, UNEVEN),
    "awac-discrete": Setting(AWACConfig(optimizer=FAST), MASKED, ONE_OF_4),
}

KEY = jax.random.PRNGKey(7)
ITEMS = [
    [MID, MID, MID],  # no boundary
    [FIRST, LAST, FIRST],  # a termination, then another episode
    [MID, LAST, FIRST],  # a truncation
    [LAST, FIRST, MID],  # no transition at all
]
WEIGHTS = [1, 2, 0.5, 1]


def linear(obs_spec, action_spec):
    """Linear networks; the critic of one choice is a linear state value."""
    both = networks(4)
    if isinstance(action_spec, specs.DiscreteArray):
        values = stateless(lambda key: jax.random.normal(key, (3, 1)), lambda w, x: x @ w)
        return PolicyAndCritic(both.policy, values)
    return both


def make(kind, policy=Greedy, **config):
    cfg = {IQL: IQLConfig, AWAC: AWACConfig}[kind]
    cfg = cfg(**{"discount": DISCOUNT, "optimizer": SGD, **config})
    return kind(cfg, VECTOR, UNEVEN, linear, policy)


def items(**changes):
    discounts = np.ones((3, 4), np.float32)
    discounts[1, 1] = 0
    return make_batch(ITEMS, AdvantageWeightedOutput, discounts=discounts, **changes)


def log_density(policy, observation, action, smallest):
    """Of a Gaussian around tanh of the first outputs, by definition."""
    mean, log_std = np.split(np.asarray(observation @ np.asarray(policy), np.float64), 2, axis=-1)
    log_std = np.clip(log_std, smallest, 2)
    z = (action - np.tanh(mean)) / np.exp(log_std)
    return (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)


def goals_of(batch, end_values):
    """Two-step targets of the three items with a transition."""
    reward = batch.trajectory.timestep.reward
    return np.array(
        [
            reward[1, 0] + DISCOUNT * reward[2, 0] + DISCOUNT**2 * end_values[0],
            reward[1, 1],
            reward[1, 2] + DISCOUNT * end_values[2],
        ]
    )


@pytest.mark.parametrize("expectile", [0.5, 0.9])
def test_the_three_losses_of_iql_by_hand(expectile):
    agent = make(IQL, expectile=expectile, inverse_temperature=2.0, max_weight=3.0)
    params = agent.initial_params(KEY)
    target = agent.initial_params(jax.random.PRNGKey(8)).critics
    batch = items(weights=WEIGHTS, seed=8)  # advantages of both signs
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, target, batch)

    steps, first = batch.trajectory.timestep, batch.trajectory.timestep.observation[0]
    action = unit(batch.trajectory.agent_output.action[0])
    value = (first @ np.asarray(params.state_value))[:, 0]
    advantage = (values_of(target, first, action).min(-1) - value)[:3]
    assert (advantage > 0).any() and (advantage < 0).any()
    side = np.where(advantage > 0, expectile, 1 - expectile)
    value_loss = (np.array(WEIGHTS[:3]) * side * advantage**2).sum() / 4
    # Items end after two steps, one step (discount 0), one step, and one step (not counted).
    ends = steps.observation[[2, 1, 1, 1], range(4)]
    goals = goals_of(batch, (ends @ np.asarray(params.state_value))[:, 0])
    errors = goals[:, None] - values_of(params.critics, first, action)[:3]
    critic_loss = (np.array(WEIGHTS[:3])[:, None] * 0.5 * errors**2).sum() / 4
    worth = np.minimum(np.exp(2.0 * advantage), 3.0)
    assert (worth == 3.0).any() and (worth < 3.0).any()
    likely = log_density(params.policy, first, action, -5)[:3]
    policy_loss = -(worth * likely).sum() / 4

    np.testing.assert_allclose(logs["value_loss"], value_loss, rtol=1e-4)
    np.testing.assert_allclose(logs["critic_loss"], critic_loss, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4)
    np.testing.assert_allclose(loss, value_loss + critic_loss + policy_loss, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*np.abs(errors).mean(-1), 0], rtol=1e-4)


def test_an_expectile_of_the_data_is_learned():
    """The value of one state with rewards 0 and 1, three to one, is the 0.9 expectile of both."""
    agent = make(IQL, expectile=0.9)
    batch = items()
    first = np.zeros((4, 3), np.float32)
    first[:, 0] = 1
    observation = np.stack([first] * 3)
    step = np.full((3, 4), MID, np.int32)
    timestep = batch.trajectory.timestep._replace(observation=observation, step_type=step)
    action = np.zeros((3, 4, 2), np.float32)
    action[0, 0] = HIGH  # in [-1, 1] it is (1, 1), the others are (-1, -1)
    action[0, 1:] = LOW
    trajectory = batch.trajectory._replace(
        timestep=timestep, agent_output=AdvantageWeightedOutput(action)
    )
    batch = batch._replace(trajectory=trajectory)
    params = agent.initial_params(KEY)
    # Critics o @ w + a @ v with the values 1 and 0.
    target = {"w": jnp.array([[0.5, 0, 0]] * 2), "v": jnp.array([[0.25, 0.25]] * 2)}
    gradient = quick_jit(jax.grad(lambda *args: agent.loss(KEY, *args)[0]))
    for _ in range(200):
        step = gradient(params, target, batch).state_value
        params = params._replace(state_value=params.state_value - 0.5 * step)
    # Where 0.9 (1 - value) = 0.1 (3 value).
    np.testing.assert_allclose(params.state_value[0, 0], 0.9 / 1.2, rtol=1e-3)


def test_the_two_losses_of_awac_by_hand():
    agent = make(AWAC, temperature=0.5)
    params = agent.initial_params(KEY)
    target = agent.initial_params(jax.random.PRNGKey(8)).critics
    batch = items(weights=WEIGHTS)
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params, target, batch)

    def drawn(observation, key):
        outputs = np.asarray(observation @ np.asarray(params.policy))
        noise = np.asarray(jax.random.normal(key, (4, 2)))
        log_std = np.clip(outputs[:, 2:], -6, 2)
        return np.clip(np.tanh(outputs[:, :2]) + np.exp(log_std) * noise, -1, 1)

    now_key, end_key = jax.random.split(KEY)
    steps, first = batch.trajectory.timestep, batch.trajectory.timestep.observation[0]
    action = unit(batch.trajectory.agent_output.action[0])
    ends = steps.observation[[2, 1, 1, 1], range(4)]
    goals = goals_of(batch, values_of(target, ends, drawn(ends, end_key)).min(-1))
    taken = values_of(params.critics, first, action)
    errors = goals[:, None] - taken[:3]
    critic_loss = (np.array(WEIGHTS[:3])[:, None] * 0.5 * errors**2).sum() / 4
    own = values_of(params.critics, first, drawn(first, now_key)).min(-1)
    score = np.exp((taken.min(-1) - own)[:3] / 0.5)
    worth = 3 * score / score.sum()
    likely = log_density(params.policy, first, action, -6)[:3]
    policy_loss = -(worth * likely).sum() / 4

    np.testing.assert_allclose(logs["critic_loss"], critic_loss, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4)
    np.testing.assert_allclose(loss, critic_loss + policy_loss, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*np.abs(errors).mean(-1), 0], rtol=1e-4)


@pytest.mark.parametrize("kind", [IQL, AWAC])
def test_each_loss_moves_its_own_part_and_targets_follow(kind):
    agent = make(kind, target_rate=0.25)
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    learn = quick_jit(agent.learner_step)
    after, new_state, _ = learn(params, state, items())
    assert_close(
        new_state.target_critics, moved(state.target_critics, after.critics, 0.25), rtol=1e-5
    )
    # Without importance weights, only the policy moves: its loss has none.
    silent, _, _ = learn(params, state, items(weights=[0] * 4))
    assert_close(silent._replace(policy=()), params._replace(policy=()), atol=0, rtol=0)
    assert_close(silent.policy, after.policy)
    nothing = make_batch([[LAST, FIRST, MID]] * 3, AdvantageWeightedOutput)
    assert_close(learn(params, state, nothing)[0], params, atol=0, rtol=0)


def test_discrete_advantages_of_awac_are_exact():
    values = np.array([[1.0, 2.0, -1.0]], np.float32)

    def discrete(obs_spec, action_spec):
        policy = stateless(lambda key: jnp.zeros(()), lambda p, x: jnp.log(x))
        critic = stateless(lambda key: jnp.zeros(()), lambda p, x: jnp.asarray(values) + p)
        return PolicyAndCritic(policy, critic)

    agent = AWAC(AWACConfig(), VECTOR, specs.DiscreteArray(3), discrete, Greedy)
    params = agent.initial_params(KEY)
    timestep = random_timesteps(VECTOR, np.array([MID]))
    timestep = timestep._replace(observation=np.array([[0.2, 0.5, 0.3]], np.float32))
    value = agent.policy_value(KEY, params.policy, params.critics, timestep)
    np.testing.assert_allclose(value, [0.2 * 1 + 0.5 * 2 - 0.3], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
def test_drawn_actions_stay_within_bounds_and_the_first_may_be_random():
    cfg = IQLConfig(random_frames=400)
    agent = IQL(cfg, VECTOR, UNEVEN, imitator_and_critic, Sample)
    random = IQL(
        cfg, VECTOR, UNEVEN, imitator_and_critic, functools.partial(sampling_policy, cfg, 200)
    )
    params = agent.initial_params(KEY)
    steps = random_timesteps(VECTOR, np.full(200, MID))
    for made, spread in ((agent, 0.5), (random, 0.3)):
        action, _ = quick_jit(made.actor_step)(KEY, params, steps, made.initial_state(200))
        action = np.asarray(action.action)
        assert (action >= LOW).all() and (action <= HIGH).all()
        assert (np.abs(unit(action)) == 1).mean() > spread - 0.3 or made is random
        assert unit(action).std() > spread


def test_what_they_cannot_do_is_refused():
    with pytest.raises(ValueError, match="expectile must be in"):
        IQLConfig(expectile=1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        AWACConfig(temperature=0.0)
    with pytest.raises(ValueError, match="min_log_std must be in"):
        IQLConfig(min_log_std=3.0)
    with pytest.raises(ValueError, match="feed-forward"):
        imitator_and_critic(VECTOR, UNEVEN, NetworkConfig(core="gru"))


def test_the_critic_has_layers_of_its_own():
    cfg = NetworkConfig(hidden_sizes=(4,), critic=CriticConfig(hidden_sizes=(12, 12)))
    network = imitator_and_critic(VECTOR, UNEVEN, cfg)
    widths = [
        {leaf.shape[-1] for leaf in jax.tree.leaves(part.init(jax.random.PRNGKey(0)))}
        for part in network
    ]
    assert 12 not in widths[0] and 12 in widths[1]
