"""A wrapper does what its agent does, in each method that drivers call.

Params that do not learn act with the counts of their run.
"""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agent import Agent, EpochAgent
from rlstack.exploration import Counts
from rlstack.families.wrapped import Frozen, FrozenParams, Wrapped, WrappedEpochs
from tests.agent_cases import (
    MID,
    VECTOR,
    CountingAgent,
    assert_close,
    quick_jit,
    random_timesteps,
    settings,
    step_types,
)
from tests.families.test_normalised import data, plain

# The parts of the default learner_step; no driver calls them on a wrapper.
PARTS = {"compute_gradients", "apply_gradients", "update_network_state", "update_learner_state"}


class Doubled(Wrapped):
    """An example of a wrapper: its agent learns from a multiple of the rewards."""

    def __init__(self, agent, factor):
        super().__init__(agent, factor)
        self.factor = factor

    def learner_step(self, params, learner_state, batch):
        trajectory = batch.trajectory
        timestep = trajectory.timestep._replace(reward=self.factor * trajectory.timestep.reward)
        batch = batch._replace(trajectory=trajectory._replace(timestep=timestep))
        return super().learner_step(params, learner_state, batch)


@pytest.mark.parametrize("wrapper, kind", [(Wrapped, Agent), (WrappedEpochs, EpochAgent)])
def test_every_method_that_drivers_call_is_passed_on(wrapper, kind):
    names = {name for name, _ in inspect.getmembers(kind, inspect.isfunction)}
    names = {name for name in names if not name.startswith("_")} - PARTS
    own = {name for base in (Wrapped, wrapper) for name in vars(base)}
    assert names - own == set()


@pytest.mark.parametrize(
    "kind, wrapper",
    [
        pytest.param("ppo", WrappedEpochs, marks=[pytest.mark.slow, pytest.mark.chosen]),
        ("dqn", Wrapped),
    ],
)
def test_a_wrapper_without_changes_acts_and_learns_as_its_agent(kind, wrapper):
    inner = plain(kind, VECTOR)
    agent = wrapper(inner)
    key = jax.random.PRNGKey(0)
    params = agent.initial_params(key)
    timestep = random_timesteps(VECTOR, np.ones(4, np.int32))
    state = agent.initial_state(4)
    found = agent.actor_step(key, params, timestep, state)
    assert_close(found, inner.actor_step(key, params, timestep, state))
    batch = data(agent, params, step_types())
    learner_state = agent.initial_learner_state(key, params)
    found, wanted = (
        quick_jit(a.learner_step)(params, learner_state, batch) for a in (agent, inner)
    )
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), found, wanted))


class FirstMinibatch(WrappedEpochs):
    """An example of a wrapper that changes a part of an update."""

    def prepare(self, params, learner_state, batch):
        learner_state, rows, schedule = super().prepare(params, learner_state, batch)
        return learner_state, rows, schedule[:1]


def test_a_wrapper_that_changes_a_part_of_an_update_learns_from_its_part():
    inner = plain("ppo", VECTOR)
    params = inner.initial_params(jax.random.PRNGKey(0))
    state = inner.initial_learner_state(jax.random.PRNGKey(1), params)
    batch = data(inner, params, step_types())
    found, _, _ = quick_jit(FirstMinibatch(inner).learner_step)(params, state, batch)
    prepared, rows, schedule = inner.prepare(params, state, batch)
    assert len(schedule) > 1
    minibatch = jax.tree.map(lambda x: jnp.asarray(x)[schedule[0]], rows)
    wanted, _, _ = quick_jit(inner.update)(params, prepared, minibatch)
    assert_close(found, wanted)


def test_a_wrapper_is_made_again_with_its_arguments():
    networks = []

    def change(network):
        networks.append(network)
        return network

    agent = Doubled(plain("dqn", VECTOR), jnp.float32(2.0))
    for again in (pickle.loads(pickle.dumps(agent)), agent.with_network(change)):
        assert type(again) is Doubled and again.factor == 2
        assert (again.cfg, again.obs_spec) == (agent.cfg, agent.obs_spec)
    assert len(networks) == 1


class Telling(CountingAgent):
    """Acts with the params and the counts of its state."""

    def initial_state(self, batch_size):
        zeros = jnp.zeros(batch_size, jnp.int32)
        return {"inside": Counts(zeros, zeros)}

    def actor_step(self, rng_key, params, timestep, state):
        counts = state["inside"]
        moved = counts._replace(env_steps=counts.env_steps + 1, episodes=counts.episodes + 1)
        return (params + 0 * counts.env_steps, counts), {"inside": moved}


def test_params_bring_the_steps_of_their_run_and_episodes_go_on():
    agent = Frozen(Telling())
    state, key = agent.initial_state(2), jax.random.PRNGKey(0)
    timestep = random_timesteps(settings()["dqn"].obs_spec, [MID, MID])
    for params, steps in ((5, 70), (6, 30), (5, 70)):
        frozen = FrozenParams(params, jnp.int32(steps))
        (own, counts), state = jax.jit(agent.actor_step)(key, frozen, timestep, state)
        assert own.tolist() == [params] * 2
        np.testing.assert_array_equal(counts.env_steps, [steps] * 2)
    np.testing.assert_array_equal(state["inside"].episodes, [3, 3])
    assert agent.initial_params(key) == FrozenParams(0, 0)
