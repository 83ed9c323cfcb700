"""Agents with networks that have state or dropout."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.agents.bc import BCConfig
from rlstack.agents.ddpg import DDPGConfig
from rlstack.agents.dqn import DQN, DQNConfig
from rlstack.agents.impala import ImpalaConfig
from rlstack.agents.iqn import IQNConfig
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.agents.pqn import PQNConfig
from rlstack.agents.r2d2 import R2D2Config
from rlstack.agents.sac import SACConfig
from rlstack.agents.td3 import TD3Config
from rlstack.configs.acting import ServiceConfig
from rlstack.exploration import Greedy
from rlstack.networks import NetworkConfig, actor_critic, q_network
from rlstack.rpc import codec
from rlstack.stateful_params import StatefulParams, weights_of
from tests.agent_cases import (
    FAST,
    FIRST,
    MID,
    NORMALISED,
    ONE_OF_4,
    UNEVEN,
    VECTOR,
    Case,
    Setting,
    acted_batch,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
    step_types,
)

NET = NetworkConfig(
    hidden_sizes=(8, 8),
    norm="batch",
    batch_norm_decay=0.8,
    dropout=0.1,
    skip=True,
    spectral_norm=True,
)
LSTM = NetworkConfig(
    hidden_sizes=(8,), norm="batch", batch_norm_decay=0.8, dropout=0.1, core="lstm", core_size=6
)
RENORM = NetworkConfig(hidden_sizes=(8,), norm="batch_renorm", batch_norm_decay=0.8)
MAIN = {
    "dqn-with-state": Setting(DQNConfig(optimizer=FAST, target_rate=0.1), VECTOR, ONE_OF_4, NET),
    "ppo-with-state": Setting(PPOConfig(optimizer=FAST), VECTOR, ONE_OF_4, RENORM, NORMALISED),
    "td3-with-state": Setting(TD3Config(optimizer=FAST), VECTOR, UNEVEN, NET),
}
OTHERS = {
    "ppo-lstm": Setting(PPOConfig(optimizer=FAST, num_minibatches=2), VECTOR, ONE_OF_4, LSTM),
    "impala": Setting(ImpalaConfig(optimizer=FAST), VECTOR, ONE_OF_4, NET),
    "iqn": Setting(
        IQNConfig(optimizer=FAST, num_fractions=4, num_target_fractions=4),
        VECTOR,
        ONE_OF_4,
        dataclasses.replace(NET, num_cosines=6),
    ),
    "pqn": Setting(PQNConfig(optimizer=FAST, num_minibatches=2), VECTOR, ONE_OF_4, NET),
    "pqn-lstm": Setting(PQNConfig(optimizer=FAST, num_minibatches=2), VECTOR, ONE_OF_4, LSTM),
    "r2d2": Setting(R2D2Config(optimizer=FAST, burn_in=1, n_step=2), VECTOR, ONE_OF_4, LSTM),
    "sac": Setting(SACConfig(optimizer=FAST, random_frames=0), VECTOR, UNEVEN, NET),
    "sac-discrete": Setting(SACConfig(optimizer=FAST, random_frames=0), VECTOR, ONE_OF_4, NET),
    "ddpg": Setting(DDPGConfig(optimizer=FAST), VECTOR, UNEVEN, NET),
    "bc": Setting(BCConfig(optimizer=FAST), VECTOR, ONE_OF_4, NET),
}
KEY = jax.random.PRNGKey(5)


def state_of(params):
    """The states of all networks in the params."""
    is_node = lambda x: isinstance(x, StatefulParams)  # noqa: E731
    return [x.state for x in jax.tree.leaves(params, is_leaf=is_node) if is_node(x)]


@pytest.fixture(scope="module")
def dqn():
    c = Case(MAIN["dqn-with-state"])
    return c, c.learn(c.params, c.learner_state, c.batch)


@pytest.mark.slow
@pytest.mark.chosen
def test_the_learner_updates_weights_and_state_and_the_target_follows_both(dqn):
    c, (params, learner_state, _) = dqn
    assert leaves_differ(weights_of(params), weights_of(c.params))
    assert leaves_differ(state_of(params), state_of(c.params))
    moved = jax.tree.map(lambda new, old: 0.1 * new + 0.9 * old, params, c.params)
    counters = {**moved.state["torso/batch_norm"], "count": 1}, learner_state.target_params.state
    assert_close(learner_state.target_params.weights, moved.weights)
    assert_close(counters[1]["torso/batch_norm"], counters[0])


@pytest.mark.slow
@pytest.mark.chosen
def test_the_running_statistics_are_those_of_the_first_steps_that_are_learned(dqn):
    c, (params, _, _) = dqn
    first = c.batch.trajectory.timestep.observation[0]
    before, kept = c.params.weights["torso/spectral_linear"], c.params.state
    largest = np.linalg.svd(before["w"])[1].max()  # the weights are orthogonal: all values equal
    features = first @ (before["w"] / largest) + before["b"]
    found = params.state["torso/batch_norm"]["mean"]
    assert kept["torso/batch_norm"]["count"] == 0  # so that the batch's are the only ones
    assert_close(found, features.mean(axis=0), atol=1e-4)


@pytest.mark.slow
@pytest.mark.chosen
def test_dropout_differs_from_update_to_update_and_evaluation_does_not(dqn):
    c, (_, learner_state, output) = dqn
    other = c.learn(c.params, c.learner_state._replace(rng_key=learner_state.rng_key), c.batch)
    assert output.logs["loss"] != other[2].logs["loss"]
    state, timestep = c.agent.initial_state(4), random_timesteps(VECTOR, [MID] * 4)
    values = [
        c.greedy.action_distribution(key, c.params, timestep, state).logits
        for key in (KEY, jax.random.PRNGKey(6))
    ]
    assert_close(*values, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_inference_service_acts_with_the_state_of_the_version(dqn):
    """Params go through the codec, as between processes."""
    c, (params, _, _) = dqn
    template = jax.eval_shape(c.agent.initial_params, KEY)
    codec.register_records(template)

    class Source:
        """Publishes first the initial params, then those after an update."""

        published: ClassVar = [(0, codec.encode(c.params)), (1, codec.encode(params))]

        def get_params(self, newer_than=-1):
            version, data = self.published[min(newer_than + 1, 1)]
            return (version, codec.decode(data)) if version > newer_than else None

    inferencer = Inferencer(ServiceConfig(), c.greedy, Source(), 4, KEY)
    timestep = random_timesteps(VECTOR, [FIRST] * 4)
    far = timestep._replace(observation=10 * timestep.observation)
    service = inferencer._served()
    try:
        answers = [service.inference(b"client", 0, np.arange(4), far) for _ in range(2)]
    finally:
        service.close()
    state = c.agent.initial_state(4)
    for answer, version in zip(answers, (c.params, params), strict=True):
        expected = c.greedy.actor_step(KEY, version, far, state)[0].action
        np.testing.assert_array_equal(answer.agent_output.action, expected)
    swapped = params._replace(state=c.params.state)
    distributions = [
        c.greedy.action_distribution(KEY, x, far, state).logits for x in (params, swapped)
    ]
    assert np.abs(distributions[0] - distributions[1]).max() > 1e-3  # the state matters


@pytest.mark.slow
@pytest.mark.chosen
def test_with_renormalisation_learning_begins_with_the_log_probabilities_of_acting():
    c = Case(MAIN["ppo-with-state"]).agent.agent
    params = c.initial_params(KEY)
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: (x + 0.3 * rng.random(x.shape)).astype(x.dtype), params.state)
    params = params._replace(state=moved)
    batch = acted_batch_of(c, params)
    learner_state = c.initial_learner_state(KEY, params)
    learner_state, rows, schedule = quick_jit(c.prepare)(params, learner_state, batch)
    minibatch = jax.tree.map(lambda x: x[np.sort(schedule[0])], rows)
    _, output = quick_jit(c.compute_gradients)(params, learner_state, minibatch)
    assert abs(output.logs["kl"]) < 1e-6


def acted_batch_of(agent, params):
    """A batch of this agent, which is not wrapped."""

    class Bare:
        key, setting, act = (
            KEY,
            MAIN["ppo-with-state"],
            staticmethod(quick_jit(agent.actor_step)),
        )

    Bare.agent = agent
    return acted_batch(Bare, params, step_types())


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", [*OTHERS, "td3-with-state"])
def test_every_agent_learns_weights_and_states(name):
    c = Case({**MAIN, **OTHERS}[name])
    params, learner_state, output = c.learn(c.params, c.learner_state, c.batch)
    assert jax.tree.structure((params, learner_state)) == jax.tree.structure(
        (c.params, c.learner_state)
    )
    found = zip(state_of(params), state_of(c.params), strict=True)
    assert [leaves_differ(new, old) for new, old in found] == [True] * len(state_of(params))
    assert leaves_differ(weights_of(params), weights_of(c.params))
    assert all(np.isfinite(x) for x in output.logs.values())
    # Other units are dropped at the next update, from the learner state alone.
    later = c.learn(c.params, learner_state, c.batch)[2]
    assert later.logs["loss"] != output.logs["loss"]


def test_an_agent_that_does_not_update_states_is_refused():
    class Plain(DQN):
        update_network_state = Agent.update_network_state

    network = functools.partial(q_network, cfg=NET)
    with pytest.raises(ValueError, match="Plain: the network must have no state and no dropout"):
        Plain(DQNConfig(), VECTOR, ONE_OF_4, network, Greedy)


def test_weights_are_optimized_and_states_are_not():
    network = functools.partial(actor_critic, cfg=RENORM)
    agent = PPO(PPOConfig(), VECTOR, ONE_OF_4, network, Greedy)
    params = agent.initial_params(KEY)
    state = agent.initial_learner_state(KEY, params)
    held = sum(x.size for x in jax.tree.leaves(state.opt_state) if jnp.ndim(x))
    assert held == 2 * sum(x.size for x in jax.tree.leaves(params.weights))  # Adam's two moments
