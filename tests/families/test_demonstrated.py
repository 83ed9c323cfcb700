"""Batches with recorded items: which rows there are, and what becomes of them."""

import jax
import numpy as np

from rlstack.agent import Agent
from rlstack.families.demonstrated import Demonstrated, Recording, is_demonstrated
from rlstack.types import Batch, LearnerOutput, TimeStep
from tests.agent_cases import VECTOR, acted_batch, assert_close, case, quick_jit, step_types

KEY = jax.random.PRNGKey(2)
STEPS = 40


def recording(c):
    """Steps whose observations and rewards are their own numbers, in episodes of eight steps."""
    number = np.arange(STEPS, dtype=np.float32)
    phase = np.arange(STEPS) % 8
    step_type = np.where(phase == 0, 0, np.where(phase == 7, 2, 1)).astype(np.int32)
    observation = np.repeat(number[:, None], 3, axis=1)
    timestep = TimeStep(step_type, number, np.ones(STEPS, np.float32), observation)
    assert c.setting.obs_spec is VECTOR
    action = np.repeat(number[:, None] / STEPS, 2, axis=1)
    return Recording(timestep, action, np.array([0, 3, 8, 30], np.int32))


def wrapped(name, share):
    c = case(name)
    return c, Demonstrated(c.agent, lambda: recording(c), share)


def test_recorded_items_follow_those_of_the_replay():
    c, agent = wrapped("sac", share=0.6)
    batch = c.batch._replace(weights=np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    joined = quick_jit(agent.joined)(KEY, batch)
    # 4 / (1 - 0.6) items in all, of which six are recorded.
    np.testing.assert_array_equal(joined.demonstrated, [False] * 4 + [True] * 6)
    np.testing.assert_allclose(joined.weights, [0.1, 0.2, 0.3, 0.4] + [1.0] * 6)
    own = jax.tree.map(lambda x: x[:, :4], joined.trajectory)
    assert_close(own, batch.trajectory, atol=0, rtol=0)
    shown = jax.tree.map(lambda x: np.asarray(x[:, 4:]), joined.trajectory)
    first = shown.timestep.reward[0]
    assert set(first) <= {0.0, 3.0, 8.0, 30.0}
    steps = first + np.arange(6)[:, None]  # items are of consecutive steps
    np.testing.assert_array_equal(shown.timestep.reward, steps)
    np.testing.assert_array_equal(shown.timestep.observation[..., 1], steps)
    np.testing.assert_allclose(shown.agent_output.action[..., 0], steps / STEPS)
    assert not jax.tree.leaves(shown.agent_state)[0].any()
    assert not is_demonstrated(batch).any()


def test_every_item_is_drawn_as_often_as_the_others():
    _, agent = wrapped("sac", share=0.5)
    batch = case("sac").batch
    draw = quick_jit(lambda key: agent.joined(key, batch).trajectory.timestep.reward[0, 4:])
    drawn = np.concatenate([draw(key) for key in jax.random.split(KEY, 500)])
    counts = [np.count_nonzero(drawn == x) for x in (0, 3, 8, 30)]
    assert sum(counts) == 2000
    np.testing.assert_allclose(counts, 500, atol=5 * np.sqrt(2000 * 3 / 16))


class Recorder(Agent):
    """Learns nothing; it gives the items' first rewards as priorities, and all rewards back."""

    writes_back = True

    def __init__(self):
        super().__init__(None, None, None, lambda *_: None, lambda: None)

    def initial_params(self, rng_key):
        return ()

    def initial_learner_state(self, rng_key, params):
        return rng_key

    def actor_step(self, rng_key, params, timestep, state):
        raise NotImplementedError

    def learner_step(self, params, learner_state, batch):
        logs = {"rows": np.float32(len(batch.weights)), "shown": batch.demonstrated.sum()}
        reward = batch.trajectory.timestep.reward
        return params, learner_state, LearnerOutput(logs, reward[0], (None, reward))


def test_priorities_are_those_of_the_replays_items_and_each_update_draws_anew():
    c = case("sac")
    agent = Demonstrated(Recorder(), lambda: recording(c), 0.5)
    state = agent.initial_learner_state(KEY, ())
    trajectory = c.batch.trajectory._replace(agent_state=())
    batch = Batch(trajectory, c.batch.weights)
    _, after, output = agent.learner_step((), state, batch)
    np.testing.assert_array_equal(output.priorities, trajectory.timestep.reward[0])
    assert agent.writes_back and output.updates[0] is None
    np.testing.assert_array_equal(output.updates[1], trajectory.timestep.reward)
    assert (output.logs["rows"], output.logs["shown"]) == (8, 4)
    assert not np.array_equal(after.rng_key, state.rng_key)
    assert np.array_equal(after.agent, state.agent)


def test_an_update_is_that_of_the_agent_on_the_joined_batch():
    c, agent = wrapped("td3", share=0.5)
    state = agent.initial_learner_state(KEY, c.params)
    batch = acted_batch(c, c.params, step_types(), seed=3)
    params, after, output = quick_jit(agent.learner_step)(c.params, state, batch)
    draw_key = jax.random.split(state.rng_key)[0]
    joined = agent.joined(draw_key, batch)
    expected = quick_jit(c.agent.learner_step)(c.params, state.agent, joined)
    assert_close((params, after.agent), expected[:2])
    assert output.priorities.shape == (4,)
