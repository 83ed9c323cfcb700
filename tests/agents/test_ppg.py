"""PPG: its memory, its auxiliary phase and its loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agents.ppg import PPG, PPGConfig, PPGMemory
from rlstack.exploration import Greedy
from rlstack.networks import CriticConfig, NetworkConfig, phasic_actor_critic
from tests.agent_cases import (
    BATCH,
    FAST,
    LENGTH,
    MASKED,
    MID,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Setting,
    assert_close,
    case,
    leaves_differ,
    quick_jit,
    random_timesteps,
)

SMALL_PPG = PPGConfig(
    optimizer=FAST, num_minibatches=2, aux_period=2, aux_steps=50, aux_epochs=2, aux_minibatches=2
)
SETTINGS = {
    "ppg": Setting(SMALL_PPG, MASKED, ONE_OF_4),
    "ppg-continuous": Setting(SMALL_PPG, VECTOR, UNEVEN),
}
KEY = jax.random.PRNGKey(5)
ROWS = LENGTH * BATCH


@pytest.mark.slow
@pytest.mark.chosen
def test_the_memory_keeps_the_steps_of_each_batch_until_the_auxiliary_phase():
    c = case("ppg")
    rows = c.prepare(c.params, c.learner_state, c.batch)[1]
    params, state, _ = c.learn(c.params, c.learner_state, c.batch)
    assert state.batches == 1
    memory = jax.tree.map(lambda x: np.asarray(x)[:ROWS], state.memory)
    assert_close(memory, PPGMemory(rows.timestep, rows.target, rows.mask), atol=0, rtol=0)
    assert not state.memory.mask[ROWS:].any()
    # The second batch begins behind the first; after it the memory is empty again.
    later, second, _ = quick_jit(c.agent.prepare)(params, state, c.batch)
    assert_close(later.memory.target[ROWS : 2 * ROWS], second.target, atol=0, rtol=0)
    _, state, _ = c.learn(params, state, c.batch)
    assert state.batches == 0 and not state.memory.mask.any()


def test_steps_with_extras_are_remembered_without_them():
    c = case("ppg-continuous")
    steps = c.batch.trajectory.timestep
    extras = {"level": np.zeros(steps.reward.shape, np.int32)}
    seen = c.batch.trajectory._replace(timestep=steps._replace(extras=extras))
    plain, with_extras = (
        quick_jit(c.agent.prepare)(c.params, c.learner_state, batch)[0].memory
        for batch in (c.batch, c.batch._replace(trajectory=seen))
    )
    assert_close(with_extras, plain, atol=0, rtol=0)


def test_the_auxiliary_phase_learns_values_in_the_policys_network_and_keeps_the_policy():
    c = case("ppg")
    state = c.prepare(c.params, c.learner_state, c.batch)[0]
    finish = quick_jit(c.agent.finish)
    same, once = finish(c.params, state)
    assert_close(same, c.params, atol=0, rtol=0)
    after, state = finish(c.params, once)  # the second batch is the period
    assert state.num_updates == once.num_updates + 4  # two epochs of two minibatches
    loss = quick_jit(c.agent.auxiliary_loss)
    rows = once.memory
    before, logs = (loss(params, c.params, rows)[1] for params in (c.params, after))
    assert logs["auxiliary_value_loss"] < before["auxiliary_value_loss"]
    assert logs["value_loss"] < before["value_loss"]
    assert before["kl"] == 0 and logs["kl"] < 1e-2
    assert leaves_differ(
        [x for name, x in after.items() if name.startswith("policy_torso")],
        [x for name, x in c.params.items() if name.startswith("policy_torso")],
    )


def test_the_auxiliary_loss_by_hand():
    agent = PPG(
        PPGConfig(clone_cost=0.3),
        VECTOR,
        ONE_OF_4,
        functools.partial(phasic_actor_critic, cfg=NetworkConfig(hidden_sizes=(6,))),
        Greedy,
    )
    params, before = agent.initial_params(KEY), agent.initial_params(jax.random.PRNGKey(6))
    timestep = random_timesteps(VECTOR, np.full(4, MID))
    target = np.array([1.0, -2.0, 0.5, 7.0], np.float32)
    rows = PPGMemory(timestep, target, np.array([True, True, True, False]))
    loss, logs = quick_jit(agent.auxiliary_loss)(params, before, rows)
    layers, olds = (jax.tree.map(np.asarray, x) for x in (params, before))

    def linear(layers, name, x):
        return x @ layers[name]["w"] + layers[name]["b"]

    def policy(layers):
        hidden = np.tanh(linear(layers, "policy_torso/linear", timestep.observation))
        logits = linear(layers, "policy_head", hidden)
        return hidden, np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    hidden, probs = policy(layers)
    _, old = policy(olds)
    auxiliary = linear(layers, "auxiliary_value_head", hidden)[:, 0]
    value = np.tanh(linear(layers, "value_torso/linear", timestep.observation))
    value = linear(layers, "value_head", value)[:, 0]
    kl = (old * np.log(old / probs)).sum(-1)[:3].mean()
    errors = [0.5 * ((x - target) ** 2)[:3].mean() for x in (auxiliary, value)]
    np.testing.assert_allclose(logs["auxiliary_value_loss"], errors[0], rtol=1e-4)
    np.testing.assert_allclose(logs["value_loss"], errors[1], rtol=1e-4)
    np.testing.assert_allclose(loss, sum(errors) + 0.3 * kl, rtol=1e-4)
    # The old policy gets no gradient.
    grads = quick_jit(jax.grad(lambda old: agent.auxiliary_loss(params, old, rows)[0]))(before)
    assert all((x == 0).all() for x in jax.tree.leaves(grads))


def test_what_does_not_fit_is_refused():
    for changes in ({"aux_period": 0}, {"clone_cost": -1.0}, {"aux_steps": 3}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            PPGConfig(**changes)
    for network in (NetworkConfig(shared=True), NetworkConfig(core="gru")):
        with pytest.raises(ValueError, match=r"separate and feed-forward.*agent PPO"):
            phasic_actor_critic(VECTOR, ONE_OF_4, network)
    c = case("ppg")
    small = PPG(
        PPGConfig(aux_steps=16),
        MASKED,
        ONE_OF_4,
        functools.partial(phasic_actor_critic, cfg=c.setting.network),
        Greedy,
    )
    state = small.initial_learner_state(KEY, c.params)
    with pytest.raises(ValueError, match=f"aux_steps must be at least the {ROWS} steps"):
        small.prepare(c.params, state, c.batch)


def test_its_value_network_may_have_another_size():
    cfg = NetworkConfig(hidden_sizes=(6,), critic=CriticConfig(hidden_sizes=(9,)))
    params = phasic_actor_critic(VECTOR, ONE_OF_4, cfg).init(KEY)
    assert params["auxiliary_value_head"]["w"].shape == (6, 1)
    assert params["value_head"]["w"].shape == (9, 1)
    assert jnp.isfinite(params["value_head"]["w"]).all()
