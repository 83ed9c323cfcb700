"""The parts of SAC, TD3 and DDPG: bounds, ensembles, networks, random first actions."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack import distributions as dist
from rlstack.exploration import Counts, Greedy, WarmUp
from rlstack.networks import (
    CriticInput,
    NetworkConfig,
    deterministic_policy_and_critic,
    ensemble,
    feed_forward,
    policy_and_critic,
)
from tests.agent_cases import (
    IMAGE,
    NESTED,
    ONE_OF_4,
    STRUCTURED,
    UNEVEN,
    VECTOR,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
)

KEY = jax.random.PRNGKey(0)


def test_bounds_move_actions_to_the_unit_box_and_back():
    bounds = dist.bounds_of(UNEVEN, "here")
    corners = np.array([[-2.0, 0.0], [2.0, 6.0], [0.0, 3.0]], np.float32)
    np.testing.assert_allclose(bounds.to_unit(corners), [[-1, -1], [1, 1], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(bounds.from_unit(bounds.to_unit(corners)), corners, atol=1e-6)
    np.testing.assert_array_equal(bounds.from_unit(np.full((1, 2), 1 + 1e-6)), [[2.0, 6.0]])
    spec = bounds.unit_spec()
    assert spec.shape == (2,) and spec.dtype == np.float32
    assert (spec.minimum == -1).all() and (spec.maximum == 1).all()


@pytest.mark.parametrize(
    "spec",
    [
        ONE_OF_4,
        STRUCTURED,
        specs.Array((2,), np.float32),
        specs.BoundedArray((2, 2), np.float32, -1, 1),
        specs.BoundedArray((2,), np.float32, -1, np.inf),
        specs.BoundedArray((2,), np.int32, -1, 1),
    ],
)
def test_actions_without_a_box_are_refused(spec):
    with pytest.raises(TypeError, match="here: the action must be one float array of rank 1"):
        dist.bounds_of(spec, "here")


def test_an_ensemble_is_its_members_side_by_side():
    network = feed_forward(lambda x: hk.nets.MLP((6, 4))(x), VECTOR)
    three = ensemble(network, 3)
    params = quick_jit(three.init)(KEY)
    step = random_timesteps(VECTOR, np.ones(5))
    unroll = random_timesteps(VECTOR, np.ones((2, 5)))
    together, _ = quick_jit(three.apply)(None, params, step, ())
    over_time, _ = quick_jit(three.unroll)(None, params, unroll, ())
    assert together.shape == (5, 3, 4) and over_time.shape == (2, 5, 3, 4)
    members = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(3)]
    assert leaves_differ(members[0], members[1])
    for i, member in enumerate(members):
        assert_close(together[:, i], network.apply(None, member, step, ())[0])
        assert_close(over_time[:, :, i], network.unroll(None, member, unroll, ())[0])


def test_members_of_an_ensemble_draw_noise_of_their_own():
    def noisy(x):
        return x + jax.random.normal(hk.next_rng_key(), x.shape)

    three = ensemble(feed_forward(noisy, VECTOR), 3)
    step = random_timesteps(VECTOR, np.ones(5))
    values, _ = three.apply(KEY, three.init(KEY), step, ())
    assert leaves_differ(values[:, 0], values[:, 1])


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("obs_spec", [VECTOR, NESTED, IMAGE], ids=["vector", "nested", "image"])
@pytest.mark.parametrize(
    ("factory", "action_spec", "outputs"),
    [
        (policy_and_critic, UNEVEN, 4),
        (policy_and_critic, ONE_OF_4, 4),
        (deterministic_policy_and_critic, UNEVEN, 2),
    ],
    ids=["continuous", "discrete", "deterministic"],
)
def test_the_two_networks_fit_the_specs(factory, obs_spec, action_spec, outputs):
    torso = "nature" if obs_spec is IMAGE else "mlp"
    pair = factory(obs_spec, action_spec, NetworkConfig(torso=torso, hidden_sizes=(8,)))
    step = random_timesteps(obs_spec, np.ones(3))
    params = quick_jit(pair.policy.init)(KEY)
    parameters, _ = quick_jit(pair.policy.apply)(None, params, step, ())
    assert parameters.shape == (3, outputs)
    assert np.abs(parameters).max() < 0.5  # the initial policy has no preference
    params = quick_jit(pair.critic.init)(KEY)
    if action_spec is ONE_OF_4:
        assert quick_jit(pair.critic.apply)(None, params, step, ())[0].shape == (3, 4)
        return
    judge = quick_jit(pair.critic.apply)
    values = [
        judge(None, params, step._replace(observation=CriticInput(step.observation, action)), ())[0]
        for action in (np.full((3, 2), 0.5, np.float32), np.full((3, 2), -0.5, np.float32))
    ]
    assert values[0].shape == (3,)
    assert leaves_differ(*values)


@pytest.mark.parametrize("changes", [{"core": "gru"}, {"noisy_sigma": 0.5}])
@pytest.mark.parametrize("factory", [policy_and_critic, deterministic_policy_and_critic])
def test_networks_of_memory_or_noise_are_refused(factory, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        factory(VECTOR, UNEVEN, NetworkConfig(**changes))


def counts(*env_steps):
    steps = jnp.asarray(env_steps, jnp.int32)
    return Counts(steps, jnp.zeros_like(steps))


def test_actions_are_random_until_all_environments_have_made_the_frames():
    many = 3000
    policy = WarmUp(Greedy(), frames=30, num_envs=3)
    progress = counts(*[9] * many, *[10] * many)
    logits = jnp.tile(jnp.array([0.0, 5.0, 1.0]), (2 * many, 1))
    mask = jnp.tile(jnp.array([True, True, False]), (2 * many, 1))
    action = jax.jit(policy)(KEY, dist.categorical(logits, mask), progress)
    assert action.dtype == np.int32 and not (action == 2).any()
    np.testing.assert_allclose(np.mean(action[:many]), 0.5, atol=0.05)
    assert (action[many:] == 1).all()


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (dist.Deterministic, -1, 1),
        (lambda mean: dist.TanhNormal(mean, mean, mean - 2.0, mean + 6.0), -2, 6),
    ],
    ids=["deterministic", "squashed"],
)
def test_random_continuous_actions_fill_the_bounds(make, low, high):
    policy = WarmUp(Greedy(), frames=1)
    action = policy(KEY, make(jnp.zeros((4000, 2))), counts(*[0] * 4000))
    assert action.min() >= low and action.max() <= high
    np.testing.assert_allclose(action.mean(0), (low + high) / 2, atol=0.15)
    np.testing.assert_allclose(action.std(0), (high - low) / np.sqrt(12), rtol=0.05)


def test_without_frames_the_policy_is_left_alone_and_ranges_are_checked():
    certain = dist.Deterministic(jnp.full((2, 2), 0.3))
    np.testing.assert_array_equal(
        WarmUp(Greedy(), frames=0)(KEY, certain, counts(0, 0)), certain.value
    )
    assert hash(WarmUp(Greedy(), 5)) == hash(WarmUp(Greedy(), 5))
    for make in (
        functools.partial(WarmUp, Greedy(), -1),
        functools.partial(WarmUp, Greedy(), 1, num_envs=0),
    ):
        with pytest.raises(ValueError, match="WarmUp"):
            make()
