"""A game that owns its loop becomes the environments of its agents."""

import traceback

import jax
import numpy as np
import pytest

from rlstack.checks import EnvError
from rlstack.entity import as_dm_env
from rlstack.entity.games.mine_sweeper import MineSweeper
from rlstack.entity.inverted import (
    EnvironmentGame,
    GameError,
    PythonGame,
    RandomAgent,
    ScoredObservation,
)
from rlstack.envs import AsyncEnv, SyncEnv
from tests.entity.inverted import games

HERE = "tests.entity.inverted.games"
pytestmark = pytest.mark.timeout(60)


def random_actions(rng, pool, timestep):
    """Legal actions, uniformly drawn."""
    actions = {}
    for name, spec in pool.spec.action.items():
        legal = timestep.observation["action_mask"][name]
        legal = legal.reshape(len(legal), *spec.shape, -1)
        drawn = np.where(legal, rng.random(legal.shape), -1.0)
        actions[name] = drawn.argmax(-1).astype(np.int32)
    return actions


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def bids(pool, value=2):
    return {"bid": np.full((pool.num_envs, 1), value, np.int32)}


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_an_environment_as_a_game_as_an_environment_is_the_same(kind):
    """Checks that the steps equal those of the environment that the game wraps."""
    rng, ends = np.random.default_rng(0), 0
    options = {"game": f"{HERE}:mine_sweeper"}
    name = "rlstack.entity.inverted:PythonGame"
    with (
        SyncEnv(name, 3, kind, options=options, seed=4) as pool,
        SyncEnv(lambda seed: as_dm_env(MineSweeper(seed=seed)), 3, "for_loop", seed=4) as plain,
    ):
        same(jax.tree.map(repr, pool.spec.action), jax.tree.map(repr, plain.spec.action))
        got, wanted = pool.reset(), plain.reset()
        for _ in range(150):
            same(got, wanted)
            ends += got.last().sum()
            actions = random_actions(rng, pool, got)
            got, wanted = pool.step(actions), plain.step(actions)
        assert ends >= 3
        first = pool.reset()
        assert first.first().all()
        same(pool.reset(), first)  # the same game, because no agent has acted


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_agents_of_a_game_are_consecutive_environments(kind):
    options = {"game": f"{HERE}:Bidding", "agents": 2}
    with SyncEnv(PythonGame, 4, kind, options=options, num_workers=2) as pool:
        for _ in range(2):  # the second reset comes in the middle of the games
            timestep = pool.reset()
            assert timestep.first().all()
            me = timestep.observation["features"]["Me"][:, 0]
            np.testing.assert_array_equal(me, [[0, 0], [1, 0], [0, 0], [1, 0]])
            for tick in range(1, 4):
                timestep = pool.step({"bid": np.array([[1], [2], [0], [1]], np.int32)})
                np.testing.assert_array_equal(timestep.reward, [1, 4, 0, 2])
                np.testing.assert_array_equal(timestep.observation["features"]["Me"][:, 0, 1], tick)
        timestep = pool.step(bids(pool))
        assert timestep.last().all()
        np.testing.assert_array_equal(timestep.reward, [2, 4, 2, 4])
        np.testing.assert_array_equal(timestep.discount, [0, 1, 0, 1])
        timestep = pool.step(bids(pool))
        assert timestep.first().all()
        np.testing.assert_array_equal(timestep.reward, 0)


@pytest.mark.parametrize("kind", ["for_loop", "thread"])
def test_an_agent_that_is_not_asked_idles(kind):
    options = {"game": games.Bidding, "agents": 2, "how": "sparse"}
    with SyncEnv(PythonGame, 2, kind, options=options) as pool:
        timestep = pool.reset()
        asked, rewards = [], []
        for _ in range(4):
            asked.append(timestep.observation["actors"]["bid"][1, 0] >= 0)
            timestep = pool.step(bids(pool))
            rewards.append(timestep.reward[1])
        assert asked == [True, False, True, False]
        assert timestep.last().all()
        assert sum(rewards) == 8


@pytest.mark.parametrize("kind", ["for_loop", "thread"])
def test_asking_one_after_the_other_is_a_dead_lock_of_synchronous_pools(kind):
    options = {"game": games.Bidding, "agents": 2, "how": "each"}
    with (
        SyncEnv(PythonGame, 2, kind, options=options) as pool,
        pytest.raises(EnvError, match=r"agent 1 has not observed yet.*act_all.*AsyncEnv"),
    ):
        pool.reset()


@pytest.mark.parametrize("how", ["each", "all"])
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_agents_of_asynchronous_pools_wait_for_one_another(kind, how):
    options = {"game": f"{HERE}:Bidding", "agents": 2, "how": how}
    with AsyncEnv(PythonGame, 4, 1, kind, options=options, num_workers=2) as pool:
        pool.async_reset()
        total, ends = np.zeros(4), np.zeros(4, int)
        for _ in range(2000):  # the games run independently
            if (ends >= 2).all():
                break
            ids, timestep = pool.recv()
            total[ids] += timestep.reward
            ends[ids] += timestep.last()
            pool.send(ids, {"bid": np.ones((1, 1), np.int32)})
        assert (ends >= 2).all()
        assert (total[[1, 3]] >= 16).all()


@pytest.mark.parametrize("kind", ["for_loop", "thread"])
def test_exceptions_of_a_game_reach_the_caller_with_their_traceback(kind):
    options = {"game": games.Bidding, "agents": 2, "fail": "raise"}
    with SyncEnv(PythonGame, 2, kind, options=options) as pool:
        pool.reset()
        with pytest.raises(RuntimeError, match="the game raised KeyError: 'lost my marbles'") as e:
            for _ in range(4):
                pool.step(bids(pool))
    text = "".join(traceback.format_exception(e.value))
    assert "in play" in text and 'raise KeyError("lost my marbles")' in text
    assert isinstance(e.value.__cause__, GameError)


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"fail": "return"}, 2, r"middle of a game.*agent\(s\) \[0, 1\]"),
        ({}, 3, "has 2 agents, so every 2 consecutive"),
        ({"fail": "hang", "step_timeout": 0.2}, 2, "has not observed for 0.2 s: the game is busy"),
    ],
)
def test_errors_of_games_and_pools(options, size, message):
    options = {"game": games.Bidding, "agents": 2, **options}
    with (
        SyncEnv(PythonGame, size, "for_loop", options=options) as pool,
        pytest.raises((EnvError, RuntimeError), match=message),
    ):
        pool.reset()
        for _ in range(4):
            pool.step(bids(pool))


def test_the_traceback_of_an_invalid_observation_shows_the_game():
    class Wrong(games.Bidding):
        def see(self, i, tick, scores):
            return ScoredObservation({"Me": [(i, np.nan)]}, games.OFFER, [0.0])

    with (
        SyncEnv(PythonGame, 2, options={"game": Wrong, "agents": 2}) as pool,
        pytest.raises(EnvError, match=r"entity 'row 0'.*tick = nan") as e,
    ):
        pool.reset()
    assert "answers = act_all(agents, seen)" in "".join(traceback.format_exception(e.value))


def test_random_agents_play_the_same_loop():
    class Judge(RandomAgent):
        scores = ()

        def act(self, observation):
            return None if len(self.scores) == 200 else super().act(observation)

        def game_over(self, observation):
            self.scores = (*self.scores, observation.score)

    game = games.count(seed=3)
    judge = Judge(game.obs_space, game.action_space, seed=1)
    game.play([judge])
    assert abs(np.mean(judge.scores) - 0.293) < 0.11
    assert isinstance(game, EnvironmentGame)


def test_metrics_of_every_observation_are_extras():
    options = {"game": f"{HERE}:Bidding", "agents": 2, "costs": "yes", "extras": ["cost"]}
    with SyncEnv(PythonGame, 4, "for_loop", options=options) as pool:
        assert pool.spec.extras["cost"].dtype == np.float32
        steps = [pool.reset(), *(pool.step(bids(pool)) for _ in range(5))]
    costs = [step.extras["cost"].tolist() for step in steps]
    assert costs[:5] == [[10 * tick, 10 * tick + 1] * 2 for tick in range(5)]
    assert steps[4].last().all() and costs[5] == [0, 1, 0, 1]


def test_an_agent_that_is_not_asked_has_extras_of_0():
    options = {"game": f"{HERE}:Bidding", "agents": 2, "how": "sparse", "costs": "yes"}
    with SyncEnv(PythonGame, 2, "for_loop", options={**options, "extras": "cost"}) as pool:
        steps = [pool.reset(), *(pool.step(bids(pool)) for _ in range(3))]
    assert [step.extras["cost"][1] for step in steps] == [1, 0, 21, 0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"costs": "yes", "extras": ["speed"]}, "extras names, speed; got cost"),
        ({"extras": ["cost"]}, "extras names, cost; got none"),
    ],
)
def test_metrics_that_a_game_does_not_show_are_named(more, message):
    options = {"game": f"{HERE}:Bidding", "agents": 1, **more}
    with (
        SyncEnv(PythonGame, 1, "for_loop", options=options) as pool,
        pytest.raises(EnvError, match=message),
    ):
        pool.reset()
        for _ in range(4):
            pool.step(bids(pool))
