"""Pools in which opponents play some of the agents."""

import numpy as np
import pytest

from rlstack.entity.inverted import PythonGame
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.opponents import (
    ITSELF,
    LEARNER,
    AsyncEnvWithOpponents,
    SyncEnvWithOpponents,
    assign_seats,
)
from tests.entity.inverted import games

pytestmark = pytest.mark.timeout(60)
NAMES = ("two", "one")


class Bidder:
    """Always makes the same bid; records its observations, by seat."""

    def __init__(self, bid):
        self.bid, self.seen = bid, {}

    def __call__(self, seats, timestep):
        agent, tick = timestep.observation["features"]["Me"][:, 0].T
        seats = range(len(agent)) if seats is None else seats
        for place, row in zip(
            seats, zip(agent, tick, timestep.step_type, strict=True), strict=True
        ):
            self.seen.setdefault(int(place), []).append(tuple(int(x) for x in row))
        return {"bid": np.full((len(agent), 1), self.bid, np.int32)}


def bids(number, value):
    return {"bid": np.full((number, 1), value, np.int32)}


def options(**more):
    return {"game": f"{games.__name__}:Bidding", "agents": 2, **more}


def test_seats_are_shared_out_as_worked_by_hand():
    seating = assign_seats(8, 2, 2, 0.5)
    me = LEARNER
    own, opposed = [me] * 4, [me, 0, me, 1, 0, me, 1, me]
    np.testing.assert_array_equal(seating.players, own + opposed)
    np.testing.assert_array_equal(seating.against, [me, me, me, me, 0, 1, 0, 1])
    three = assign_seats(4, 3, 1, 1.0)
    np.testing.assert_array_equal(
        three.players.reshape((4, 3)), [[me, 0, 0], [0, me, 0], [0, 0, me], [me, 0, 0]]
    )
    np.testing.assert_array_equal(three.against, 0)


@pytest.mark.parametrize(
    ("num_envs", "agents", "share", "opposed"),
    [
        (8, 2, 0.25, 2),
        (10, 2, 0.2, 2),
        (8, 4, 0.5, 4),
        (1, 2, 0.5, 1),
        (8, 2, 0.3, 4),
        (9, 3, 1, 9),
    ],
)
def test_the_share_holds_or_is_the_next_that_leaves_whole_games(num_envs, agents, share, opposed):
    seating = assign_seats(num_envs, agents, 1, share)
    assert (seating.against >= 0).sum() == opposed
    assert (seating.players == LEARNER).sum() == len(seating.against) == num_envs
    assert len(seating.players) == num_envs - opposed + agents * opposed
    games_ = seating.players.reshape((-1, agents)) == LEARNER
    assert set(games_.sum(axis=1)) <= {1, agents}


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_the_learner_is_shown_its_own_seats_alone(kind):
    seating, players = assign_seats(8, 2, 2, 0.5), [Bidder(2), Bidder(1)]
    pool = SyncEnv(PythonGame, len(seating.players), kind, options=options(), num_workers=2)
    with SyncEnvWithOpponents(pool, seating, players, NAMES) as env:
        assert env.opponents == (ITSELF,) * 4 + ("two", "one", "two", "one")
        assert env.num_envs == 8 and env.is_sync and env.spec is pool.spec
        for _ in range(2):  # the second reset comes in the middle of the games
            timestep = env.reset()
            assert timestep.first().all() and len(timestep.reward) == 8
            agent = timestep.observation["features"]["Me"][:, 0, 0]
            np.testing.assert_array_equal(agent, [0, 1, 0, 1, 0, 0, 1, 1])
            timestep = env.step(bids(8, 1))
            np.testing.assert_array_equal(timestep.reward, [1, 2, 1, 2, 1, 1, 2, 2])
            # The total includes the opponents' bids: 2 * 2 or 1 * 2 as agent 1, 2 or 1 as 0.
            total = timestep.observation["features"]["__global__"][:, 0, 0]
            np.testing.assert_array_equal(total, [3, 3, 3, 3, 5, 3, 4, 3])
        for _ in range(3):
            timestep = env.step(bids(8, 1))
        assert timestep.last().all()
        assert env.step(bids(8, 1)).first().all()
    for player in players:  # in both games: agent 1, then agent 0; every tick, including the last
        assert set(player.seen) == {0, 1}
        for place, rows in player.seen.items():
            agent = 1 - place
            steps = [(0, 0), (0, 0), (1, 1), (2, 1), (3, 1), (4, 2)]
            assert rows == [(agent, tick, kind) for tick, kind in steps]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_opponents_of_an_asynchronous_pool_answer_at_once(kind):
    seating, players = assign_seats(4, 2, 2, 0.5), [Bidder(2), Bidder(1)]
    seats = len(seating.players)
    inner = AsyncEnv(PythonGame, seats, 1, kind, options=options(), num_workers=seats // 2)
    with AsyncEnvWithOpponents(inner, seating, players, NAMES, wait_num=2) as env:
        with pytest.raises(RuntimeError, match="2 environments must be in flight; 0 are"):
            env.recv()
        env.async_reset()
        total, ends = np.zeros(4), np.zeros(4, int)
        for _ in range(2000):  # the games advance independently
            if (ends >= 2).all() and min(len(player.seen.get(0, ())) for player in players) > 10:
                break
            ids, timestep = env.recv()
            assert ids.shape == timestep.reward.shape == (2,)
            assert len(set(ids.tolist())) == 2
            total[ids] += timestep.reward
            ends[ids] += timestep.last()
            own = timestep.observation["features"]["Me"][:, 0, 0]
            np.testing.assert_array_equal(own, np.array([0, 1, 0, 0])[ids])
            env.send(ids, bids(2, 1))
        assert (ends >= 2).all()
        assert (total >= [8, 16, 8, 8]).all()
        with pytest.raises(RuntimeError, match="can be reset only once"):
            env.async_reset()
        with pytest.raises(ValueError, match=r"env_ids must lie in \[0, 4\)"):
            env.send([4], bids(1, 1))
    for player in players:
        assert set(player.seen) == {0}
        assert len(player.seen[0]) > 10


def test_mistakes_are_errors_where_they_are_made():
    seating = assign_seats(2, 2, 1, 1.0)
    pool = SyncEnv(PythonGame, 4, options=options())
    with SyncEnvWithOpponents(pool, seating, [Bidder(1)], ["one"]) as env:
        with pytest.raises(RuntimeError, match="reset, or recv after a send, must come first"):
            env.step(bids(2, 1))
        env.reset()
        with pytest.raises(ValueError, match=r"must have 2 rows.*got shape \(4, 1\)"):
            env.step(bids(4, 1))
        with pytest.raises(TypeError, match="must be a dict with keys"):
            env.step({"ask": 1})
        env.send(bids(2, 1))
        with pytest.raises(RuntimeError, match="recv after a send"):
            env.send(bids(2, 1))
        env.recv()
        assert env.stats() == {"restarts": 0, "masks_without_choice": 0}
    with pytest.raises(RuntimeError, match="it was closed"):
        env.reset()
