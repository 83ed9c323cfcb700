"""PPO with a ratio per actor and with an annealed entropy bonus, both by hand."""

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack import distributions
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.distributions import parts
from rlstack.exploration import Sample
from rlstack.families.epochs import EpochRows
from rlstack.families.policy_gradient import PolicyGradientOutput
from rlstack.networks import ActorCriticOutput, Network
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import quick_jit

# Two actors of three choices, and one of two.
ACTIONS = {
    "move": specs.BoundedArray((2,), np.int32, 0, 2),
    "mode": specs.BoundedArray((1,), np.int32, 0, 1),
}
NUM_LOGITS = 8


def _network():
    def apply(key, params, timestep, state):
        x = timestep.observation["x"]
        return ActorCriticOutput(x @ params["policy_head"], x @ params["value_head"]), state

    def init(key):
        return {
            "policy_head": jax.random.normal(key, (3, NUM_LOGITS)),
            "value_head": jax.random.normal(key, (3,)),
        }

    return Network(init, apply, apply, lambda batch_size: ())


def _agent(**config):
    spec = {"x": specs.Array((3,), np.float32)}
    return PPO(PPOConfig(**config), spec, ACTIONS, lambda *_: _network(), Sample)


def _observation(size, seed=0):
    rng = np.random.default_rng(seed)
    move = np.ones((size, 2, 3), bool)
    move[::2, 1, 1:] = False  # at every other step there is no second actor
    return {
        "x": rng.normal(size=(size, 3)).astype(np.float32),
        "action_mask": {"move": move.reshape(size, 6), "mode": np.ones((size, 2), bool)},
    }


@pytest.mark.slow
@pytest.mark.chosen
def test_parts_sum_to_the_whole_and_those_without_a_choice_are_told():
    observation = _observation(4)
    logits = np.random.default_rng(1).normal(size=(4, NUM_LOGITS))
    joint = distributions.from_parameters(ACTIONS, logits, observation["action_mask"])
    action = joint.sample(jax.random.PRNGKey(0))
    found = parts(joint, action)
    np.testing.assert_allclose(found.log_prob.sum(-1), joint.log_prob(action), rtol=1e-5)
    np.testing.assert_allclose(found.entropy.sum(-1), joint.entropy(), rtol=1e-5)
    # In the order of the leaves: mode, then the two actors that move.
    np.testing.assert_array_equal(found.decides, [[True, True, i % 2 == 1] for i in range(4)])


def test_other_distributions_are_one_part():
    logits = np.zeros((2, 3), np.float32)
    choice = distributions.from_parameters(specs.DiscreteArray(3), logits)
    found = parts(choice, np.array([0, 2]))
    np.testing.assert_allclose(found.log_prob, np.log([[1 / 3], [1 / 3]]), rtol=1e-6)
    real = distributions.from_parameters(specs.Array((2,), np.float32), np.zeros((5, 4)))
    found = parts(real, np.zeros((5, 2)))
    assert found.log_prob.shape == found.entropy.shape == (5, 1)
    assert np.asarray(found.decides).all()


def test_the_loss_per_actor_is_the_mean_over_who_decides():
    size = 6
    agent = _agent(ratio="per_actor", normalise_advantages=False, entropy_cost=0.3)
    params = agent.initial_params(jax.random.PRNGKey(0))
    rng = np.random.default_rng(2)
    steps = TimeStep(np.ones(size, np.int32), np.zeros(size), np.ones(size), _observation(size))
    output, _ = quick_jit(agent.actor_step)(jax.random.PRNGKey(3), params, steps, ())
    assert output.behaviour_log_prob.shape == (size, 3)
    shift = rng.choice(np.log([0.6, 0.95, 1.1, 1.7]), size=(size, 3)).astype(np.float32)
    behaviour = np.asarray(output.behaviour_log_prob) - shift
    advantage, target = rng.normal(size=(2, size)).astype(np.float32)
    mask = np.arange(size) != 3
    rows = EpochRows(
        steps,
        PolicyGradientOutput(output.action, behaviour, output.value),
        advantage,
        target,
        mask,
        (),
    )
    loss, logs = quick_jit(agent.loss)(params, rows)
    logits = np.asarray(steps.observation["x"] @ params["policy_head"], np.float64)
    terms, entropies = [], []
    for i in np.flatnonzero(mask):
        for k, (first, width) in enumerate(((0, 2), (2, 3), (5, 3))):
            if k == 2 and i % 2 == 0:
                continue
            probs = np.exp(logits[i, first : first + width])
            probs /= probs.sum()
            entropies.append(-(probs * np.log(probs)).sum())
            ratio = np.exp(shift[i, k])
            near = min(max(ratio, 0.8), 1.2)
            terms.append(-min(ratio * advantage[i], near * advantage[i]))
    value_loss = 0.5 * ((np.asarray(output.value) - target)[mask] ** 2).mean()
    expected = np.mean(terms) + 0.5 * value_loss - 0.3 * np.mean(entropies)
    np.testing.assert_allclose(logs["policy_loss"], np.mean(terms), rtol=1e-4)
    np.testing.assert_allclose(logs["entropy"], np.mean(entropies), rtol=1e-4)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("ratio", ["joint", "per_actor"])
def test_the_entropy_bonus_falls_to_0_over_the_optimizers_steps(ratio):
    agent = _agent(
        ratio=ratio, entropy_cost=0.4, entropy_anneal_steps=8, num_epochs=2, num_minibatches=1
    )
    params = agent.initial_params(jax.random.PRNGKey(0))
    state = agent.initial_learner_state(jax.random.PRNGKey(1), params)
    length, size = 3, 4
    observation = jax.tree.map(
        lambda x: x.reshape((length, size, *x.shape[1:])), _observation(length * size)
    )
    ones = np.ones((length, size), np.float32)
    timestep = TimeStep(ones.astype(np.int32), ones, ones, observation)
    act = quick_jit(jax.vmap(agent.actor_step, in_axes=(None, None, 0, None)))
    output, _ = act(jax.random.PRNGKey(2), params, timestep, ())
    trajectory = Transition(timestep, output, (), ones)
    batch = Batch(trajectory, np.ones(size, np.float32))
    learn = quick_jit(agent.learner_step)
    for expected in (0.4, 0.3, 0.2, 0.1, 0.0, 0.0):
        _, rows, _ = agent.prepare(params, state, batch)
        np.testing.assert_allclose(rows.entropy_cost, expected, atol=1e-6)
        _, with_bonus = agent.loss(params, rows)
        _, without = agent.loss(params, rows._replace(entropy_cost=0 * rows.entropy_cost))
        np.testing.assert_allclose(
            without["loss"] - with_bonus["loss"], expected * without["entropy"], atol=1e-5
        )
        params, state, _ = learn(params, state, batch)
