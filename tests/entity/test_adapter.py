"""The adapter follows dm_env's step types, and every kind of pool accepts adapted games."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from rlstack.entity import (
    GlobalCategorical,
    GlobalCategoricalMask,
    Observation,
    ObsSpace,
    as_dm_env,
)
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.types import StepType
from tests.entity.cases import SWEEPER, Scripted, Skirmish, build_skirmish, legal_actions
from tests.envs.test_contract import ASYNC, SYNC

SIZE, STEPS = 3, 25


def leaves(observation):
    return {(part, name): rows for part, by in observation.items() for name, rows in by.items()}


def alone(env_id):
    """The steps of one environment run alone, with its own random choices."""
    env, rng = build_skirmish(env_id), np.random.default_rng(env_id)
    timestep = env.reset()
    history = []
    for _ in range(STEPS + 1):
        history.append(timestep)
        batch = {part: {n: v[None] for n, v in by.items()} for part, by in
                 timestep.observation.items()}  # fmt: skip
        action = legal_actions(batch, env.action_spec(), rng)
        timestep = env.step({name: row[0] for name, row in action.items()})
    return history


def assert_same(timestep, row, expected):
    assert timestep.step_type[row] == expected.step_type
    assert timestep.reward[row] == np.float32(expected.reward or 0)
    assert timestep.discount[row] == (1 if expected.discount is None else expected.discount)
    wanted, got = leaves(expected.observation), leaves(timestep.observation)
    assert wanted.keys() == got.keys()
    for path, values in wanted.items():
        assert got[path].dtype == values.dtype and got[path].shape[1:] == values.shape
        np.testing.assert_array_equal(got[path][row], values)


def choose(timestep, spec, rngs):
    rows = []
    for row, rng in enumerate(rngs):
        one = {p: {n: v[row][None] for n, v in by.items()}
               for p, by in timestep.observation.items()}  # fmt: skip
        rows.append(legal_actions(one, spec, rng))
    return {name: np.concatenate([row[name] for row in rows]) for name in spec}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SYNC)
def test_sync_pools_return_the_steps_of_each_environment(kind):
    expected = [alone(i) for i in range(SIZE)]
    rngs = [np.random.default_rng(i) for i in range(SIZE)]
    ends = set()
    with SyncEnv(build_skirmish, SIZE, kind, num_workers=2) as env:
        timestep = env.reset()
        for step in range(STEPS + 1):
            for row in range(SIZE):
                assert_same(timestep, row, expected[row][step])
                if timestep.step_type[row] == StepType.LAST:
                    ends.add(float(timestep.discount[row]))
            timestep = env.step(choose(timestep, env.spec.action, rngs))
    assert ends == {0.0, 1.0}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ASYNC)
def test_async_pools_return_the_steps_of_each_environment(kind):
    expected = [alone(i) for i in range(SIZE)]
    rngs = [np.random.default_rng(i) for i in range(SIZE)]
    seen = [0] * SIZE
    with AsyncEnv(build_skirmish, SIZE, 2, kind, num_workers=2) as env:
        env.async_reset()
        while min(seen) < STEPS:
            ids, timestep = env.recv()
            for row, i in enumerate(ids.tolist()):
                if seen[i] <= STEPS:
                    assert_same(timestep, row, expected[i][seen[i]])
                seen[i] += 1
            env.send(ids, choose(timestep, env.spec.action, [rngs[i] for i in ids.tolist()]))


def nobody(**outcome):
    return Observation({}, **outcome)


def no_action(env):
    return {name: np.zeros(spec.shape, np.int32) for name, spec in env.action_spec().items()}


def test_step_types_and_metrics():
    game = Scripted(
        [
            nobody(done=True),
            nobody(truncated=True),
            nobody(metrics={"mines": 3.0}),
            nobody(reward=1.5),
            nobody(reward=2, done=True, metrics={"mines": 1.0}),
            nobody(),
            nobody(truncated=True),
            nobody(),
            nobody(done=True, truncated=True),
        ]
    )
    env = as_dm_env(game)
    first = env.reset()  # skips the two episodes that end at once
    assert first[:3] == (StepType.FIRST, None, None)
    assert env.last_metrics == {"mines": 3.0}
    shown = [env.step(no_action(env))[:3] for _ in range(6)]
    assert shown == [
        (StepType.MID, 1.5, 1.0),
        (StepType.LAST, 2.0, 0.0),
        (StepType.FIRST, None, None),
        (StepType.LAST, 0.0, 1.0),
        (StepType.FIRST, None, None),
        (StepType.LAST, 0.0, 0.0),  # the game has ended in the step of its limit
    ]
    assert env.last_observation is game.observations[-1]
    assert len(game.told) == 4  # the actions at LAST were ignored


def test_an_end_in_the_step_of_the_limit_is_told_once(caplog):
    both = [nobody(), nobody(done=True, truncated=True)]
    env = as_dm_env(Scripted(both * 2), name="TwoEnds")
    for _ in range(2):
        env.reset()
        assert env.step(no_action(env)).discount == 0.0
    (line,) = caplog.messages
    assert line.startswith("TwoEnds: an observation has done and truncated")


def test_a_game_that_is_always_over_at_once_is_an_error():
    env = as_dm_env(Scripted([nobody(done=True)]), name="Over")
    with pytest.raises(ValueError, match=r"Over: reset: must begin an episode .* got 100 in a row"):
        env.reset()


def test_games_get_every_action_type_also_without_actors():
    game = Scripted([*SWEEPER, nobody()])
    env = as_dm_env(game)
    env.reset()
    env.step({"Move": np.array([4, 0]), "Fire Orbital Cannon": np.array([0])})
    env.step({"Move": np.array([1, 0]), "Fire Orbital Cannon": np.array([5])})
    assert [actions["Move"].labels for actions in game.told] == [["Defuse"], ["Down"]]
    assert game.told[1]["Fire Orbital Cannon"].actees == [("Robot", 0)]
    assert env.to_actions({"Move": [0, 1], "Fire Orbital Cannon": [0]})["Move"].actors == [
        ("Robot", 0),
        ("Robot", 1),
    ]
    timestep = env.step({"Move": np.array([4, 2]), "Fire Orbital Cannon": np.array([0])})
    assert not any(timestep.observation["count"].values())
    env.step(no_action(env))
    assert set(game.told[-1]) == {"Move", "Fire Orbital Cannon"}
    assert all(len(action.actors) == 0 for action in game.told[-1].values())


def test_illegal_choices_are_refused_if_validated():
    env = as_dm_env(Scripted(SWEEPER[1:]), name="Sweeper")
    env.reset()
    rule = r"Sweeper: action 'Move', actor \('Robot', 0\): must take one of .* \[1, 2, 4\]; got 3"
    with pytest.raises(ValueError, match=rule):
        env.step({"Move": np.array([3, 0]), "Fire Orbital Cannon": np.array([0])})
    rule = r"'Fire Orbital Cannon', actor \('Orbital Cannon', 0\): .* slots \[0, 5\]; got 7"
    with pytest.raises(ValueError, match=rule):
        env.step({"Move": np.array([1, 0]), "Fire Orbital Cannon": np.array([7])})
    env = as_dm_env(Scripted(SWEEPER[1:]), validate=False)
    env.reset()
    env.step({"Move": np.array([3, 0]), "Fire Orbital Cannon": np.array([0])})


def test_errors_of_a_game_reach_the_user_of_a_pool():
    def build(seed):
        wrong = Observation({"Mine": [[np.nan, 0]]})
        return as_dm_env(Scripted([SWEEPER[0], wrong]), name="Sweeper")

    with SyncEnv(build, 1, "for_loop") as env:
        env.reset()
        with pytest.raises(ValueError, match=r"'Mine', entity 'row 0'.* x = nan"):
            env.step({"Move": np.zeros((1, 2), int), "Fire Orbital Cannon": np.zeros((1, 1), int)})


def test_without_validation_steps_are_the_same():
    one, other = as_dm_env(Skirmish(1)), as_dm_env(Skirmish(1), validate=False)
    assert one.name == "Skirmish"
    shown, again = one.reset(), other.reset()
    for _ in range(20):
        assert shown[:3] == again[:3]
        jax.tree.map(np.testing.assert_array_equal, shown.observation, again.observation)
        action = no_action(one)
        for name, mask in shown.observation["action_mask"].items():
            action[name] = np.argmax(mask.reshape(len(action[name]), -1), axis=1)
        shown, again = one.step(action), other.step(action)


def test_a_missing_action_is_an_error():
    env = as_dm_env(Scripted(SWEEPER))
    env.reset()
    with pytest.raises(
        ValueError, match="Scripted: action 'Move': must be given; got nothing for it"
    ):
        env.step({})


def build_lever(seed: int):
    """A game without entities: four of the observation's dicts are empty or nearly so."""
    del seed
    shown = [Observation({}, {"Pull": GlobalCategoricalMask([False, True])}, reward=i) for i in
             range(3)]  # fmt: skip
    return as_dm_env(Scripted(shown, ObsSpace(), {"Pull": GlobalCategorical(("a", "b"))}))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SYNC)
def test_pools_take_observations_without_entities(kind):
    with SyncEnv(build_lever, 2, kind, num_workers=2) as env:
        timestep = env.reset()
        for reward in (1, 2, 0):
            observation = timestep.observation
            assert observation["features"] == observation["count"] == observation["visible"] == {}
            assert observation["actors"]["Pull"].tolist() == [[0], [0]]
            assert observation["action_mask"]["Pull"].tolist() == [[False, True]] * 2
            timestep = env.step({"Pull": np.ones((2, 1), np.int32)})
            assert timestep.reward.tolist() == [reward] * 2
