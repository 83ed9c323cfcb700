"""Observation processors: what the wrapped agent sees, the specs of it, and what is refused."""

import functools
import pickle

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.agent import EpochAgent
from rlstack.families.observing import Observing, ObservingEpochs, View, observing
from tests.agent_cases import (
    MASKED,
    NESTED,
    VECTOR,
    assert_close,
    quick_jit,
    random_timesteps,
    step_types,
)
from tests.families.test_normalised import data, plain

KEPT = specs.Array((2,), np.float32)


def ends(observation):
    return observation[np.array([0, 2])]


def by_hand(timestep):
    return timestep._replace(observation=np.asarray(timestep.observation)[..., [0, 2]])


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_acting_and_learning_see_the_same(kind):
    inner = plain(kind, KEPT)
    agent = observing(inner, View(ends, VECTOR))
    assert type(agent) is (ObservingEpochs if isinstance(inner, EpochAgent) else Observing)
    assert agent.obs_spec == VECTOR and inner.obs_spec == KEPT
    key = jax.random.PRNGKey(0)
    params = agent.initial_params(key)
    batch = data(agent, params, step_types())
    timestep = random_timesteps(VECTOR, np.ones(4, np.int32))
    state = agent.initial_state(4)
    for name in ("actor_step", "action_distribution"):
        found = getattr(agent, name)(key, params, timestep, state)
        wanted = getattr(inner, name)(key, params, by_hand(timestep), state)
        assert_close(jax.tree.leaves(found), jax.tree.leaves(wanted))
    learner_state = agent.initial_learner_state(key, params)
    trajectory = batch.trajectory
    shown = batch._replace(trajectory=trajectory._replace(timestep=by_hand(trajectory.timestep)))
    found = quick_jit(agent.learner_step)(params, learner_state, batch)
    wanted = quick_jit(inner.learner_step)(params, learner_state, shown)
    assert_close(found, wanted)
    again = pickle.loads(pickle.dumps(agent))
    assert_close(again.view(timestep), by_hand(timestep))


def test_entries_that_stay_keep_their_specs():
    def only_flag(observation):
        return {"flag": observation["flag"], "sum": observation["place"].sum(keepdims=True)}

    view = View(only_flag, NESTED)
    assert view.seen_spec["flag"] is NESTED["flag"]
    assert view.seen_spec["sum"] == specs.Array((1,), np.float32)
    assert View(lambda x: {**x}, MASKED).seen_spec == MASKED
    rows = random_timesteps(NESTED, np.ones((3, 4), np.int32))
    seen = view(rows).observation
    assert seen["flag"].shape == (3, 4)
    assert_close(seen["sum"], rows.observation["place"].sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "function, text",
    [
        ("no.such:function", "observation_processor 'no.such:function': there is no module 'no'"),
        (lambda: None, "does not take these arguments"),
        (lambda x: x["speed"], r"for float32\[3\] it raised"),
        (lambda x: float(x[0]), "it raised ConcretizationTypeError: "),
        (lambda x: {}, "returned no arrays"),
    ],
)
def test_what_does_not_fit_is_refused(function, text):
    with pytest.raises(ValueError, match=text) as caught:
        View(function, VECTOR)
    assert "\n" not in str(caught.value)


def test_partial_functions_have_names():
    assert View(functools.partial(ends), VECTOR).seen_spec == KEPT
