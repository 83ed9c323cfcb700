"""TD3: smoothed targets, and the delay of policy and targets, step by step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.td3 import TD3, TD3Config
from rlstack.exploration import GaussianNoise, Greedy, Sample, UniformNoise
from rlstack.families.off_policy import DeterministicOutput, behaviour_policy
from rlstack.networks import NetworkConfig, deterministic_policy_and_critic
from rlstack.optimizers import OptimizerConfig
from tests.agent_cases import (
    FAST,
    FIRST,
    LAST,
    MID,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    quick_jit,
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

SETTINGS = {"td3": Setting(TD3Config(optimizer=FAST, num_critics=3), VECTOR, UNEVEN)}

KEY = jax.random.PRNGKey(7)


def make(policy=Greedy, **config):
    cfg = TD3Config(**{"discount": DISCOUNT, "optimizer": SGD, **config})
    return TD3(cfg, VECTOR, UNEVEN, lambda *_: networks(2), policy)


@pytest.mark.parametrize("num_critics", [1, 2, 3])
def test_the_critics_loss_by_hand(num_critics):
    agent = make(num_critics=num_critics, target_noise=0.5, target_noise_clip=0.4)
    params, target = (agent.initial_params(jax.random.PRNGKey(i)) for i in (1, 2))
    target = scaled(target, 0.5)
    batch = make_batch(
        [[MID, MID, MID], [MID, MID, LAST], [MID, LAST, FIRST], [LAST, FIRST, MID]],
        DeterministicOutput,
        weights=[1, 2, 0.5, 1],
        discounts=np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]], np.float32),
    )
    loss, (logs, priorities) = quick_jit(agent.loss)(KEY, params.critics, target, batch)

    steps = batch.trajectory.timestep
    ends = steps.observation[[2, 2, 1, 1], range(4)]
    noise = 0.5 * np.asarray(jax.random.normal(KEY, (4, 2)))
    assert (np.abs(noise) > 0.4).any() and (np.abs(noise) < 0.4).any()
    action = np.clip(np.tanh(ends @ target.policy) + np.clip(noise, -0.4, 0.4), -1, 1)
    least = values_of(target.critics, ends, action).min(-1)
    reward = steps.reward
    two = reward[1] + DISCOUNT * reward[2]
    goals = np.array([two[0] + DISCOUNT**2 * least[0], two[1], reward[1, 2] + DISCOUNT * least[2]])
    action = unit(batch.trajectory.agent_output.action[0])
    errors = goals[:, None] - values_of(params.critics, steps.observation[0], action)[:3]
    np.testing.assert_allclose(
        loss, (np.array([1, 2, 0.5])[:, None] * 0.5 * errors**2).sum() / 4, rtol=1e-4
    )
    np.testing.assert_allclose(priorities, [*np.abs(errors).mean(-1), 0], rtol=1e-4)
    np.testing.assert_allclose(logs["loss"], loss)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_policy_and_targets_move_at_every_second_update_of_the_critics(period):
    agent = make(policy_period=period, target_rate=0.25)
    params = scaled(agent.initial_params(KEY), 0.3)
    state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[MID, MID]] * 5, DeterministicOutput)
    observation = batch.trajectory.timestep.observation[0]
    learn = quick_jit(agent.learner_step)
    gradient = quick_jit(jax.grad(agent.loss, argnums=1, has_aux=True))
    policy, target = np.asarray(params.policy), params
    for update in (1, 2, 3):
        noise_key = jax.random.split(state.rng_key)[1]
        grads, _ = gradient(noise_key, params.critics, state.target_params, batch)
        critics = jax.tree.map(lambda x, g: x - 0.5 * g, params.critics, grads)
        if update % period == 0:
            # The first critic is o @ w + tanh(o @ policy) @ v: its slope by the chain rule.
            action = np.tanh(observation @ policy)
            slope = (1 - action**2) * np.asarray(params.critics["v"][0])
            policy = policy + 0.5 * observation.T @ slope / 5
        before = state.rng_key
        params, state, _ = learn(params, state, batch)
        assert_close(params.critics, critics)
        np.testing.assert_allclose(params.policy, policy, rtol=1e-4)
        if update % period == 0:
            target = moved(target, params, 0.25)
        assert_close(state.target_params, target)
        assert state.num_updates == update
        assert not np.array_equal(before, state.rng_key)


def test_the_policys_optimizer_counts_its_own_updates():
    adam = OptimizerConfig(learning_rate=0.01)
    agent = make(optimizer=adam, policy_optimizer=OptimizerConfig(learning_rate=0.1))
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[MID, MID]] * 5, DeterministicOutput)
    learn = quick_jit(agent.learner_step)
    start = params
    for _ in range(3):
        params, state, _ = learn(params, state, batch)
    assert int(state.opt_state.policy[0].count) == 1
    assert int(state.opt_state.critics[0].count) == 3
    # Adam's first step has the size of its learning rate for any gradient.
    np.testing.assert_allclose(np.abs(params.policy - start.policy), 0.1, rtol=0.02)


def test_items_without_a_transition_teach_neither():
    agent = make(policy_period=1)
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[LAST, FIRST, MID]] * 3, DeterministicOutput)
    grads, output = quick_jit(agent.compute_gradients)(params, state, batch)
    assert all(np.all(x == 0) for x in jax.tree.leaves(grads))
    assert np.all(output.priorities == 0)


def test_it_explores_by_the_configured_noise():
    for kind, expected in (("gaussian", GaussianNoise), ("uniform", UniformNoise)):
        policy = behaviour_policy(TD3Config(noise=kind, noise_scale=0.3, random_frames=9), 3)
        assert (policy.frames, policy.num_envs) == (9, 3)
        assert policy.policy == expected(0.3, minimum=-1.0, maximum=1.0)


def test_what_it_cannot_do_is_refused():
    recurrent = functools.partial(deterministic_policy_and_critic, cfg=NetworkConfig(core="lstm"))
    with pytest.raises(ValueError, match=r"feed-forward.*network.core none.*ppo"):
        TD3(TD3Config(), VECTOR, UNEVEN, recurrent, Sample)
    pair = networks(2)
    own = pair._replace(critic=pair.critic._replace(initial_state=lambda n: jnp.zeros((n, 1))))
    with pytest.raises(ValueError, match=r"TD3: .*feed-forward"):
        TD3(TD3Config(), VECTOR, UNEVEN, lambda *_: own, Sample)
    with pytest.raises(TypeError, match="TD3: the action must be one float array"):
        TD3(TD3Config(), VECTOR, ONE_OF_4, lambda *_: pair, Sample)
    for changes in (
        {"discount": -0.1},
        {"num_critics": 0},
        {"policy_period": 0},
        {"target_rate": 1.5},
        {"target_noise": -1.0},
        {"target_noise_clip": -1.0},
        {"noise": "pink"},
        {"noise_scale": -1.0},
        {"random_frames": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            TD3Config(**changes)
