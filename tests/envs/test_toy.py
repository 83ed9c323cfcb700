"""The toy environments have the answers that their docstrings state."""

from __future__ import annotations

import pickle
import unittest

import dm_env.test_utils
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.types import StepType
from tests.envs import toy

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
pytestmark = pytest.mark.timeout(60)


class _Conforms(dm_env.test_utils.EnvironmentTestMixin):
    def make_action_sequence(self):
        for _ in range(50):  # several episodes
            yield self.make_action()


class TestCatchConforms(_Conforms, unittest.TestCase):
    def make_object_under_test(self):
        return toy.Catch(rows=4)


class TestMemoryCueConforms(_Conforms, unittest.TestCase):
    def make_object_under_test(self):
        return toy.MemoryCue()


class TestTruncatingChainConforms(_Conforms, unittest.TestCase):
    def make_object_under_test(self):
        return toy.TruncatingChain(4)


def play(env, policy, steps):
    """Returns the mean reward at LAST steps and all rows."""
    timestep, rows = env.reset(), []
    for _ in range(steps):
        timestep = env.step(policy(timestep.observation))
        rows.append(timestep)
    return rows


def returns(rows):
    reward = np.stack([r.reward for r in rows])
    last = np.stack([r.step_type for r in rows]) == LAST
    return reward[last].mean()


@pytest.mark.parametrize("name", ["Catch", "MemoryCue", "TruncatingChain", "PointMass"])
def test_picklable_and_seeded(name):
    builder = pickle.loads(pickle.dumps(getattr(toy, name)))
    first = [SyncEnv(builder, 3, seed=s).reset().observation for s in (1, 1, 2)]
    np.testing.assert_array_equal(first[0], first[1])
    np.testing.assert_array_equal(first[0][1:], first[2][:-1])  # env i is seeded with seed + i


def test_catch_is_solved_by_following_the_ball():
    def follow(board):
        ball = board[:, :-1].sum(1).argmax(-1)
        paddle = board[:, -1].argmax(-1)
        return np.sign(ball - paddle) + 1

    with SyncEnv(toy.Catch, 4, options={"rows": 6, "columns": 5}) as env:
        rows = play(env, follow, 60)
        assert env.spec.observation.shape == (6, 5)
        assert returns(rows) == 1.0
        types = [int(r.step_type[0]) for r in rows[:7]]
        assert types == [MID, MID, MID, MID, LAST, FIRST, MID]
        assert {float(r.discount[0]) for r in rows if r.step_type[0] == LAST} == {0.0}
        idle = play(env, lambda board: np.ones(4, int), 60)
        assert returns(idle) < 0.5


def test_memory_cue_needs_memory():
    options = {"delay": 2, "num_cues": 2}
    cue = np.zeros(16, int)

    def remember(observation):
        shown = observation[:, :2].any(1)
        cue[shown] = observation[shown, :2].argmax(1)
        return cue

    with SyncEnv(toy.MemoryCue, 16, options=options) as env:
        assert returns(play(env, remember, 100)) == 1.0
        blind = returns(play(env, lambda o: np.zeros(16, int), 400))
        assert abs(blind) < 0.2  # chance; 7 standard errors of 1,280 episodes
        row = env.reset()
        shown = [row.observation[0]] + [
            env.step(np.zeros(16, int)).observation[0] for _ in range(3)
        ]
        assert shown[0][:2].sum() == 1
        assert not shown[1].any()
        assert shown[3].tolist() == [0, 0, 1]


def test_truncating_chain_is_cut_not_ended():
    with SyncEnv(toy.TruncatingChain, 1, options={"length": 4}) as env:
        rows = play(env, lambda o: np.zeros(1, int), 10)
    assert [int(r.step_type[0]) for r in rows[:5]] == [MID, MID, MID, LAST, FIRST]
    assert {float(r.discount[0]) for r in rows} == {1.0}
    assert {float(r.observation[0, 0]) for r in rows} == {1.0}
    assert [float(r.reward[0]) for r in rows[:5]] == [1, 1, 1, 1, 0]


def test_point_mass_goes_home():
    with SyncEnv(toy.PointMass, 4) as env:
        rows = play(env, lambda p: np.clip(-10 * p, -1, 1), 20)
        assert np.abs(rows[-1].observation).max() < 0.05
        assert (rows[-1].step_type == LAST).all()
        assert (rows[-1].discount == 1).all()


def test_masked_dict_punishes_illegal_actions():
    with SyncEnv(toy.MaskedDict, 4) as env:
        first = env.reset()
        assert set(env.spec.observation) == {"action_mask", "target"}
        best = env.step(first.observation["target"].argmax(1))
        assert (best.reward == 1).all()
        mask = best.observation["action_mask"]
        assert mask.dtype == np.int8
        wrong = env.step(mask.argmin(1))
        np.testing.assert_array_equal(wrong.reward == -1, mask.min(1) == 0)
    with SyncEnv(toy.MaskedDict, 16, options={"strict": True}) as env:
        mask = env.reset().observation["action_mask"]
        with pytest.raises(RuntimeError, match="is illegal under mask"):
            env.step(mask.argmin(1))


def test_multi_discrete_pays_by_part():
    with SyncEnv(toy.MultiDiscrete, 3) as env:
        assert env.spec.action.maximum.tolist() == [2, 1, 3]
        asked = np.rint(env.reset().observation * [3, 2, 4]).astype(int)
        timestep = env.step(asked)
        assert (timestep.reward == 1).all()
        asked = np.rint(timestep.observation * [3, 2, 4]).astype(int)
        asked[:, 1] = 1 - asked[:, 1]
        np.testing.assert_allclose(env.step(asked).reward, 2 / 3, rtol=1e-6)
        with pytest.raises(ValueError, match=r"must lie in \[0, \[2, 1, 3\]\]|must lie in"):
            env.step(np.array([[0, 2, 0]] * 3))
