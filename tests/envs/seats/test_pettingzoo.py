"""Parallel environments of PettingZoo as rows of a pool."""

import numpy as np
import pytest

from rlstack.checks import EnvCrash, EnvError
from rlstack.envs import SyncEnv
from rlstack.envs.seats.pettingzoo import Parallel, ParallelGame

pytestmark = pytest.mark.timeout(60)
DYING = "tests.envs.seats.parallel_envs:Dying"


def test_agents_that_end_keep_rows_without_transitions():
    with SyncEnv(Parallel, 6, "for_loop", options={"game": DYING}) as pool:
        assert Parallel.seats(game=DYING) == ("a", "b", "c")
        for _ in range(2):
            first = pool.reset()
            np.testing.assert_array_equal(first.observation, 1.0)
            steps = [pool.step(np.array([0, 1, 2, 3, 2, 1])) for _ in range(3)]
            game = [[step.reward[:3].tolist() for step in steps], [1, 2, 3]]
            assert game[0] == [[1, 2, 3], [0, 2, 3], [0, 0, 3]]  # actions count from 1 there
            discounts = [step.discount[3:].tolist() for step in steps]
            assert discounts == [[0, 1, 1], [1, 0, 1], [1, 1, 1]]  # the last one is truncated
            kinds = [step.step_type[:3].tolist() for step in steps]
            assert kinds == [[2, 1, 1], [0, 2, 1], [0, 0, 2]]
            np.testing.assert_array_equal(steps[1].observation[:3, 0], [0, 3, 3])
            np.testing.assert_array_equal(pool.episode_metrics(np.array([2]))["time"], [3])


def test_returns_of_an_agent_that_joins_begin_there():
    options = {"game": "tests.envs.seats.parallel_envs:Joining"}
    with SyncEnv(Parallel, 3, "for_loop", options=options) as pool:
        first = pool.reset()
        np.testing.assert_array_equal(first.observation[:, 0], [1, 1, 0])
        steps = [pool.step(np.array([0, 1, 2])) for _ in range(3)]
        assert [step.reward.tolist() for step in steps] == [[1, 2, 0], [1, 2, 0], [1, 2, 3]]
        assert [step.discount.tolist() for step in steps] == [[1] * 3] * 3
        assert [step.step_type.tolist() for step in steps] == [[1, 1, 0], [1, 1, 0], [2, 2, 2]]
        np.testing.assert_array_equal(steps[1].observation[:, 0], 3)  # c sees the game it joins


def test_the_state_of_an_environment_is_for_the_critic():
    options = {"game": "tests.envs.seats.parallel_envs:Surveyed", "critic_state": "game"}
    with SyncEnv(Parallel, 3, "for_loop", options=options) as pool:
        pool.reset()
        seen = pool.step(np.zeros(3, np.int64)).observation
        np.testing.assert_array_equal(seen["critic_state"], [[1]] * 3)
    with pytest.raises(EnvCrash, match="critic_state=game needs a game with state"):
        SyncEnv(Parallel, 3, "for_loop", options={"game": DYING, "critic_state": "game"})


def test_only_the_first_reset_has_the_seed():
    game = ParallelGame(DYING, seed=7)
    game.reset()
    game.reset()
    assert game._env.seeds == [7, None]


def test_environments_that_do_not_fit_are_named():
    with pytest.raises(EnvError, match=r"must be the same for all agents.*b has"):
        ParallelGame(DYING, wide=True)
    with pytest.raises(ValueError, match="must be a module with a function parallel_env"):
        ParallelGame("json")
    with pytest.raises(EnvCrash, match="nowhere"):
        SyncEnv(Parallel, 3, "for_loop", options={"game": "nowhere.at_all"})


def test_simple_spread_of_mpe():
    pytest.importorskip("mpe2")
    options = {"game": "mpe2.simple_spread_v3", "N": 3, "max_cycles": 5}
    with SyncEnv(Parallel, 6, "for_loop", options=options, seed=1) as pool:
        first = pool.reset()
        assert first.observation.shape == (6, 18)
        for _ in range(5):
            step = pool.step(np.zeros(6, np.int64))
        np.testing.assert_array_equal(step.step_type, 2)
        np.testing.assert_array_equal(step.discount, 1.0)  # a time limit
        assert (step.reward < 0).all()
