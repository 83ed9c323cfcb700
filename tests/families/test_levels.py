"""An agent that chooses levels: scores by hand, what it learns from, and what it draws."""

import dataclasses
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.agent import Agent
from rlstack.agents.dqn import DQNConfig
from rlstack.configs.levels import LevelsConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.families.levels import LevelsOutput, LevelsState, choosing_levels, only
from rlstack.families.normalised import normalised
from rlstack.types import Batch, LearnerOutput, StepType, TimeStep, Transition
from tests.agent_cases import (
    LENGTH,
    VECTOR,
    assert_close,
    leaves_differ,
    quick_jit,
    random_timesteps,
    step_types,
)
from tests.families.test_normalised import data, plain

FIRST, MID, LAST = map(int, StepType)
KEY = jax.random.PRNGKey(0)
GAMMA, LAMBDA = 0.5, 0.5


class Config(NamedTuple):
    discount: float = GAMMA
    gae_lambda: float = LAMBDA


class Output(NamedTuple):
    action: Any
    value: Any


class Given(Agent):
    """Its values are those of the steps; its learner state is the batch that it was given."""

    has_values = True

    def __init__(self):
        super().__init__(Config(), VECTOR, None, lambda *_: None, lambda: None)

    def initial_params(self, rng_key):
        return jnp.zeros(())

    def initial_learner_state(self, rng_key, params):
        return ()

    def actor_step(self, rng_key, params, timestep, state):
        rows = len(timestep.reward)
        return Output(jnp.zeros(rows, jnp.int32), jnp.zeros(rows)), state

    def trajectory_values(self, params, trajectory):
        return trajectory.agent_output.value

    def learner_step(self, params, learner_state, batch):
        return params + 1, batch, LearnerOutput({"loss": params})


# Two environments, T = 4. The first plays level 4 (replayed) and then 2; the other one level 2.
STEP_TYPE = np.array([[FIRST, MID], [MID, MID], [LAST, MID], [FIRST, LAST], [MID, FIRST]], np.int32)
REWARD = np.array([[0, 0], [0, 0], [1, 0], [0, 2], [0, 0]], np.float32)
DISCOUNT = np.array([[1, 1], [1, 1], [0, 1], [1, 0], [1, 1]], np.float32)
LEVEL = np.array([[4, 2], [4, 2], [4, 2], [2, 2], [2, 7]], np.int32)
VALUE = np.array([[0.2, 1.0], [0.4, 3.0], [0.0, 1.0], [0.5, 0.0], [0.7, 0.0]], np.float32)
REPLAYED = np.array([[True, False]] * 3 + [[False, False], [False, True]])
RETURN = np.array([[0, 0], [0, 0], [1, 0], [0, 2.5], [0, 0]], np.float32)


def batch():
    timestep = TimeStep(
        STEP_TYPE, REWARD, DISCOUNT, np.zeros((5, 2, 3), np.float32), {"level": LEVEL}
    )
    action = np.zeros((5, 2), np.int32)
    made = LevelsOutput({"action": action, "level": action}, Output((), VALUE), REPLAYED, RETURN)
    state = LevelsState((), action, REPLAYED, REPLAYED, RETURN)
    trajectory = Transition(timestep, made, state, np.zeros((5, 2), np.int32))
    return jax.tree.map(jnp.asarray, Batch(trajectory, np.ones(2, np.float32)))


def learned(**options):
    agent = choosing_levels(Given(), LevelsConfig(**options), 10)
    params = quick_jit(agent.initial_params)(KEY)
    return agent, quick_jit(agent.learner_step)(
        params, agent.initial_learner_state(KEY, params), batch()
    )


def scores(state):
    pairs = zip(np.asarray(state.table.level), np.asarray(state.table.score), strict=True)
    return {int(level): float(score) for level, score in pairs if level >= 0}


def test_positive_value_loss():
    """Advantages of level 4: at its second step 1 - 0.4, before it 0.5 x 0.4 - 0.2 + 0.25 x 0.6.

    Those of level 2: 0.5 x 0.7 - 0.5 in the first environment; in the second 2 - 1 at the end, then
    0.5 x 1 - 3 + 0.25 x 1 and 0.5 x 3 - 1 - 0.25 x 2.25. The negative ones count as 0.
    """
    _, (_, state, _) = learned(kind="plr", score_function="pvl")
    found = scores(state)
    assert found.keys() == {4, 2}
    assert found[4] == pytest.approx((0.6 + 0.15) / 2)
    assert found[2] == pytest.approx((0 + 1 + 0 + 0) / 4)


def test_max_monte_carlo():
    """Level 4: 1 - (0.2 + 0.4) / 2. Level 2: its return is 2.5, and 4 values are 5.5 in all."""
    agent, (params, state, output) = learned(kind="plr", score_function="MaxMC")
    assert scores(state) == pytest.approx({4: 1 - 0.3, 2: 2.5 - 5.5 / 4})
    assert float(output.logs["levels_held"]) == 2
    assert float(output.logs["levels_replayed"]) == pytest.approx(2 / 6)
    # Of the ten levels half must be held before they are played again.
    assert float(params.levels.replay) == 0
    low = dataclasses.replace(agent.levels, minimum_fill_ratio=0.2)
    assert float(choosing_levels(Given(), low, 10)._sampling(state.table).replay) == np.float32(0.8)


def test_robust_plr_learns_from_replayed_episodes_only():
    _, (_, state, _) = learned(kind="robust_plr")
    taken = state.agent.trajectory.timestep
    np.testing.assert_array_equal(
        taken.step_type, [[FIRST, FIRST], [MID, FIRST], [LAST, FIRST], [FIRST, FIRST], [FIRST] * 2]
    )
    assert np.asarray(taken.reward).tolist() == [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]
    assert np.asarray(taken.discount).tolist() == [[1, 1], [1, 1], [0, 1], [1, 1], [1, 1]]
    assert scores(state).keys() == {4, 2}  # all levels are scored
    _, (_, other, _) = learned(kind="plr")
    np.testing.assert_array_equal(other.agent.trajectory.timestep.step_type, STEP_TYPE)


@pytest.mark.parametrize("kind", ["ppo", "dqn"])
def test_steps_that_are_left_out_have_no_effect(kind):
    """Whatever the first two environments saw and got, the update is the same."""
    agent = plain(kind)
    params = agent.initial_params(KEY)
    state, given = agent.initial_learner_state(KEY, params), data(agent, params, step_types())
    learn, rng, updates = quick_jit(agent.learner_step), np.random.default_rng(0), []
    kept = np.ones((LENGTH + 1, 4), bool)
    kept[:, :2] = False
    for _ in range(2):
        timestep = jax.tree.map(np.array, given.trajectory.timestep)
        timestep.observation[:, :2] = rng.normal(size=(LENGTH + 1, 2, 3))
        timestep.reward[:, :2] = rng.normal(size=(LENGTH + 1, 2))
        changed = given.trajectory._replace(timestep=only(kept, timestep))
        updates.append(learn(params, state, given._replace(trajectory=changed))[0])
    assert leaves_differ(updates[0], params)
    assert_close(*updates, 1e-7, 1e-6)


def with_return(rows, **changes):
    timestep = random_timesteps(VECTOR, rows)
    extras = {"level": np.array(changes.pop("level"), np.int32)}
    return timestep._replace(extras=extras, **changes)


def test_acting_follows_what_was_drawn():
    """The second environment was restarted, with a level of its own."""
    agent = choosing_levels(Given(), LevelsConfig(kind="plr"), 10)
    params, yes, no = agent.initial_params(KEY), np.ones(3, bool), np.zeros(3, bool)
    state = LevelsState((), np.array([4, 4, 5]), yes, no, np.array([8, 8, 2], np.float32))
    timestep = with_return(
        [FIRST, FIRST, MID], level=[4, 6, 7], reward=np.array([0, 0, 3], np.float32)
    )
    state = agent.reset_state(state, timestep.first())
    output, after = agent.actor_step(KEY, params, timestep, state)
    assert np.asarray(output.replayed).tolist() == [True, False, False]
    assert np.asarray(output.episode_return).tolist() == [0, 0, 5]
    np.testing.assert_array_equal(output.action["level"], after.drawn)
    assert not np.asarray(after.replays).any()  # nothing has a score yet
    assert set(agent.read_once(state)) >= {True}


def even(table):
    return (table.level % 2 == 0) * (1.0 + table.episodes)


def test_a_rule_gives_weights_to_levels():
    agent = choosing_levels(Given(), LevelsConfig(kind="rule", rule=even), 6)
    params = agent.initial_params(KEY)
    np.testing.assert_allclose(params.levels.cumulative, np.array([1, 1, 2, 2, 3, 3]) / 3)
    state = agent.initial_learner_state(KEY, params)
    after, state, _ = quick_jit(agent.learner_step)(params, state, batch())
    # One episode of level 2 and one of level 4 have ended.
    np.testing.assert_allclose(after.levels.cumulative, np.array([1, 1, 3, 3, 5, 5]) / 5)
    np.testing.assert_allclose(np.asarray(state.table.mean_return)[[2, 4]], [2.5, 1])
    with pytest.raises(ValueError, match=r"env\.levels must be at most levels\.max_size"):
        choosing_levels(Given(), LevelsConfig(kind="rule", rule=even, max_size=5), 6)


def test_values_are_in_units_of_the_environments_rewards():
    inner = plain("ppo")
    agent = normalised(inner, NormalisationConfig(rewards="reward", reward_scale=2.0))
    params = agent.initial_params(KEY)
    reward = params.statistics.reward._replace(variance=[jnp.float32(4.0)])
    params = params._replace(statistics=params.statistics._replace(reward=reward))
    trajectory = data(inner, inner.initial_params(KEY), step_types()).trajectory
    found = agent.trajectory_values(params, trajectory)
    np.testing.assert_allclose(found, trajectory.agent_output.value / (2.0 / 2.0), rtol=1e-4)
    fixed = normalised(inner, NormalisationConfig(reward_scale=0.5))
    found = fixed.trajectory_values(fixed.initial_params(KEY), trajectory)
    np.testing.assert_allclose(found, trajectory.agent_output.value * 2, rtol=1e-6)


def test_the_value_of_a_state_is_that_of_the_best_action():
    agent = plain("dqn")
    params = agent.initial_params(KEY)
    trajectory = data(agent, params, step_types()).trajectory
    found = quick_jit(agent.trajectory_values)(params, trajectory)
    rows = jax.tree.map(lambda x: np.asarray(x)[2], trajectory.timestep)
    values = agent.network.apply(None, params, rows, ())[0]
    np.testing.assert_allclose(found[2], np.asarray(values).max(-1), rtol=1e-5)


def test_an_agent_of_evaluation_has_the_same_params_and_the_agents_actions():
    inner = plain("ppo")
    cfg = LevelsConfig(kind="plr")
    agent = choosing_levels(inner, cfg, 10)
    judge = choosing_levels(inner, cfg, 10, chooses=False)
    params = agent.initial_params(KEY)
    assert_close(judge.initial_params(KEY), params, 0, 0)
    timestep = random_timesteps(VECTOR, [MID, FIRST])
    found = judge.actor_step(KEY, params, timestep, judge.initial_state(2))
    assert_close(found, inner.actor_step(KEY, params.agent, timestep, inner.initial_state(2)))
    again = pickle.loads(pickle.dumps(agent))
    assert again.levels == cfg and again.agent.cfg == inner.cfg


class Valueless(Given):
    has_values = False


class Writing(Given):
    writes_back = True


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="Valueless, which gives no values"):
        choosing_levels(Valueless(), LevelsConfig(kind="plr"), 10)
    assert choosing_levels(Valueless(), LevelsConfig(), 10).levels.kind == "uniform"
    with pytest.raises(ValueError, match="Writing, which writes back"):
        choosing_levels(Writing(), LevelsConfig(), 10)
    for wrong in ({"temperature": 0.0}, {"replay_prob": 1.5}, {"max_size": 0}, {"rule": even}):
        with pytest.raises(ValueError, match=f"LevelsConfig: {next(iter(wrong))} must be"):
            LevelsConfig(**wrong)
    assert DQNConfig().discount == 0.99
