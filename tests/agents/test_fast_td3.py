"""FastTD3: its two kinds of targets against numpy, its policy, its targets and its noise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.fast_td3 import FastTD3, FastTD3Config, behaviour_policy
from rlstack.distributions import Deterministic
from rlstack.exploration import Counts, GaussianNoise, Greedy, WarmUp
from rlstack.families.off_policy import DeterministicOutput
from tests.agent_cases import FAST, MID, UNEVEN, VECTOR, Setting, assert_close, quick_jit
from tests.agents.linear_control import DISCOUNT, SGD, make_batch, moved, scaled, unit
from tests.agents.test_soft_variants import (
    ATOMS,
    ENDS,
    divergences,
    items,
    opinions,
    pair,
    projected,
    rewards_and_discounts,
    softmax,
)

SMALL = {"optimizer": FAST, "min_value": -5.0, "max_value": 5.0}
SETTINGS = {
    "fast-td3": Setting(FastTD3Config(**SMALL), VECTOR, UNEVEN, ATOMS),
    "fast-td3-mean": Setting(
        FastTD3Config(clipped=False, noise="uniform", **SMALL), VECTOR, UNEVEN, ATOMS
    ),
}
KEY = jax.random.PRNGKey(7)


def make(**config):
    cfg = {"discount": DISCOUNT, "optimizer": SGD, "min_value": -2.0, "max_value": 2.0, **config}
    return FastTD3(FastTD3Config(**cfg), VECTOR, UNEVEN, lambda *_: pair(2, 5), Greedy)


@pytest.mark.parametrize("clipped", [True, False])
def test_the_critics_loss_is_that_of_numpy(clipped):
    agent = make(clipped=clipped, target_noise=0.5, target_noise_clip=0.4)
    batch = items(weights=[1, 2, 0.5, 1])
    params = scaled(agent.initial_params(KEY), 0.5)
    target = scaled(agent.initial_params(jax.random.PRNGKey(8)), 0.7)
    loss, (_, priorities) = quick_jit(agent.loss)(KEY, params.critics, target, batch)
    steps, atoms = batch.trajectory.timestep, np.linspace(-2, 2, 5)
    ends = steps.observation[ENDS, range(4)]
    noise = np.clip(0.5 * np.asarray(jax.random.normal(KEY, (4, 2))), -0.4, 0.4)
    action = np.clip(np.tanh(ends @ np.asarray(target.policy)) + noise, -1, 1)
    probs = softmax(opinions(target.critics, ends, action))
    least = (probs @ atoms).argmin(1)
    reward, discount = rewards_and_discounts(steps.reward)
    taken = opinions(
        params.critics, steps.observation[0], unit(batch.trajectory.agent_output.action[0])
    )
    found = np.zeros((3, 2))
    for b in range(3):
        for critic in range(2):
            chosen = probs[b, least[b] if clipped else critic]
            goal = projected(reward[b] + discount[b] * atoms, chosen, atoms)
            found[b, critic] = divergences(goal[None], taken[b, critic][None, None])[0, 0]
    np.testing.assert_allclose(loss, found.sum(-1) @ [1, 2, 0.5] / 4, rtol=1e-4)
    np.testing.assert_allclose(priorities, [*found.mean(-1), 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("clipped", "of"), [(True, np.min), (False, np.mean)])
def test_the_policy_maximises_the_smaller_or_the_mean_value(clipped, of):
    agent, batch = make(clipped=clipped), items()
    params = agent.initial_params(KEY)
    steps, atoms = batch.trajectory.timestep, np.linspace(-2, 2, 5)
    action = np.tanh(steps.observation[0] @ np.asarray(params.policy))
    values = softmax(opinions(params.critics, steps.observation[0], action)) @ atoms
    loss = quick_jit(agent.policy_loss)(params.policy, params.critics, batch)
    np.testing.assert_allclose(loss, -of(values, axis=1)[:3].sum() / 4, rtol=1e-4)


def test_the_targets_of_critics_move_at_each_update_and_the_policy_is_its_own_target():
    agent = make(policy_period=2, target_rate=0.25)
    params = scaled(agent.initial_params(KEY), 0.3)
    state = agent.initial_learner_state(KEY, params)
    batch = make_batch([[MID, MID]] * 5, DeterministicOutput)
    learn, policies = quick_jit(agent.learner_step), [params.policy]
    for _ in range(4):
        critics = state.target_params.critics
        params, state, _ = learn(params, state, batch)
        assert_close(state.target_params.critics, moved(critics, params.critics, 0.25))
        assert_close(state.target_params.policy, params.policy, atol=0, rtol=0)
        policies.append(params.policy)
    changed = [not np.array_equal(x, y) for x, y in itertools.pairwise(policies)]
    assert changed == [False, True, False, True]


def test_each_environment_draws_the_scale_of_its_noise_in_each_episode():
    policy = behaviour_policy(FastTD3Config(noise_scale=0.4, least_noise_scale=0.1), 256)
    assert isinstance(policy, WarmUp) and isinstance(policy.policy, GaussianNoise)
    envs = np.arange(256, dtype=np.int32)
    mode = Deterministic(np.zeros((256, 400), np.float32))

    @functools.partial(jax.jit, static_argnums=0)
    def spread(seed, episode, steps):
        counts = Counts(jnp.full(256, steps), jnp.full(256, episode), envs)
        return policy(jax.random.PRNGKey(seed), mode, counts).std(-1)

    first, same, later = spread(1, 0, 3), spread(2, 0, 50), spread(3, 1, 99)
    for found in (first, later):
        assert 0.1 * 0.85 < found.min() < 0.13 and 0.37 < found.max() < 0.4 * 1.15
        np.testing.assert_allclose(found.mean(), 0.25, atol=0.03)
    np.testing.assert_allclose(first, same, rtol=0.3)  # two samples of 400 numbers
    assert np.corrcoef(first, same)[0, 1] > 0.95 > 0.3 > np.corrcoef(first, later)[0, 1]


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="least_noise_scale must be in"):
        FastTD3Config(noise_scale=0.1, least_noise_scale=0.2)
    with pytest.raises(ValueError, match="min_value"):
        FastTD3Config(min_value=300.0)
