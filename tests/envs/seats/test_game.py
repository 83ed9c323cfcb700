"""Games of several seats as rows of a pool."""

import numpy as np
import pytest

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.seats.game import Seats
from tests.envs.seats.echo import Echo, EchoSeats, UnequalSeats

pytestmark = pytest.mark.timeout(60)
NAME = "tests.envs.seats.echo:EchoSeats"


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_consecutive_rows_are_the_seats_of_a_game(kind):
    more = {"num_workers": 2} if kind == "process" else {}
    with SyncEnv(NAME, 4, kind, seed=5, **more) as pool:
        first = pool.reset()
        np.testing.assert_array_equal(first.observation[:, 0], [0, 1, 0, 1])
        np.testing.assert_array_equal(first.observation[:, 2], [5, 5, 7, 7])
        for start in (0, 3):  # two episodes; actions of the step to FIRST are ignored
            step = pool.step(np.arange(4) + start)
            np.testing.assert_array_equal(step.reward, np.array([0, 11, 2, 13]) + start)
            np.testing.assert_array_equal(step.step_type, 1)
            last = pool.step(np.arange(4))
            np.testing.assert_array_equal(last.step_type, 2)
            np.testing.assert_array_equal(last.discount, 0.0)
            np.testing.assert_array_equal(pool.episode_metrics(np.arange(4))["of_seat"], [0, 1] * 2)
            again = pool.step(np.full(4, 9))
            np.testing.assert_array_equal(again.step_type, 0)
            np.testing.assert_array_equal(again.observation[:, 1], 0)


def test_a_reset_in_the_middle_begins_new_games():
    with SyncEnv(EchoSeats, 2, "for_loop", options={"length": 9}) as pool:
        pool.reset()
        pool.step(np.zeros(2, np.int64))
        np.testing.assert_array_equal(pool.reset().observation[:, 1], 0)
        np.testing.assert_array_equal(pool.step(np.array([3, 4])).reward, [3, 14])


@pytest.mark.parametrize("kind", ["for_loop", "thread", "process"])
def test_a_seat_that_leaves_makes_no_transition_until_the_next_game(kind):
    """The right seat leaves in the first of three steps: LAST, then FIRST until the next game."""
    more = {"num_workers": 1} if kind == "process" else {}
    with SyncEnv(UnequalSeats, 2, kind, options={"length": 3}, **more) as pool:
        pool.reset()
        for _ in range(2):
            steps = [pool.step(np.array([1, 2])) for _ in range(4)]
            assert [step.step_type.tolist() for step in steps] == [[1, 2], [1, 0], [2, 0], [0, 0]]
            assert [step.reward.tolist() for step in steps] == [[1, 12], [1, 0], [1, 0], [0, 0]]
            assert [step.discount.tolist() for step in steps] == [[1, 0], [1, 1], [0, 1], [1, 1]]
            assert steps[3].observation[:, 1].tolist() == [0, 0]  # the next game
        metrics = pool.episode_metrics(np.array([1]))
        np.testing.assert_array_equal(metrics["return_of_right"], [12])
        assert "team_return" not in metrics  # the left seat plays on
        pool.step(np.zeros(2, np.int64))
        again = pool.reset()  # in the middle of a game that a seat has left
        assert again.step_type.tolist() == [0, 0] and again.observation[:, 1].tolist() == [0, 0]


def test_pools_of_parts_of_games_are_refused():
    with SyncEnv(EchoSeats, 3, "for_loop") as pool, pytest.raises(EnvError, match="multiple of 2"):
        pool.reset()
        pool.step(np.zeros(3, np.int64))
    with AsyncEnv(EchoSeats, 2, 1, "thread") as pool, pytest.raises(EnvError, match="wait_num"):
        pool.async_reset()
        ids, _ = pool.recv()
        pool.send(ids, np.zeros(1, np.int64))
        for _ in range(3):
            pool.recv()


def test_seats_never_join_a_game_of_a_pool_that_was_closed():
    builder = Seats(Echo)
    closed = builder(seed=0)
    closed.close()  # and still referred to, as by garbage that was not collected
    envs = [builder(seed=seed) for seed in (3, 4)]
    assert [env.seat for env in envs] == [0, 1]
    assert envs[0].game is envs[1].game is not closed.game


def test_a_builder_names_the_seats_and_adds_a_seed():
    class Chatty:
        """Has options of any name, and no seed."""

        seats = ("a", "b", "a")

        def __init__(self, size=1, **options):
            self.options = options

    builder = Seats(Chatty)
    assert builder.seats(size=2, colour=3) == ("a", "b", "a")
    assert "seed" in builder.__signature__.parameters
    envs = [builder(seed=i, colour=3) for i in range(6)]
    assert [env.seat for env in envs] == [0, 1, 2, 0, 1, 2]
    assert envs[0].game is envs[2].game is not envs[3].game
    assert envs[0].game.options == {"colour": 3}
