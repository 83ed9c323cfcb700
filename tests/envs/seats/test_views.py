"""Several policies that share the rows of a pool."""

import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.envs.seats.views import SharedPool
from tests.envs.seats.echo import EchoSeats, UnequalSeats

pytestmark = pytest.mark.timeout(60)


def shared(rows, num_envs=4, num_seats=2, rng=None, **options):
    pool = SyncEnv(EchoSeats, num_envs, "for_loop", options=options)
    return SharedPool(pool, rows, num_seats, rng)


def test_each_view_has_its_rows_and_the_pool_steps_after_the_last():
    with shared({"a": [0, 3], "b": [1, 2]}) as division:
        a, b = division.views["a"], division.views["b"]
        assert (a.num_envs, b.num_envs) == (2, 2)
        assert list(a.env_ids) == [0, 1]
        np.testing.assert_array_equal(a.reset().observation[:, 0], [0, 1])
        np.testing.assert_array_equal(b.reset().observation[:, 0], [1, 0])
        for _ in range(2):
            a.send(np.array([1, 2]))
            b.send(np.array([3, 4]))
            last = b.recv()  # in any order
            np.testing.assert_array_equal(a.recv().reward, [1, 12])
            np.testing.assert_array_equal(last.reward, [13, 4])
        np.testing.assert_array_equal(a.episode_metrics(np.array([1]))["of_seat"], [1])
        np.testing.assert_array_equal(b.episode_metrics(np.arange(2))["of_seat"], [1, 0])


def test_one_view_of_all_rows_is_the_pool():
    with SyncEnv(EchoSeats, 4, "for_loop") as pool, shared({"all": range(4)}) as division:
        (view,) = division.views.values()
        np.testing.assert_array_equal(view.reset().observation, pool.reset().observation)
        for i in range(5):
            actions = np.array([1, 2, 3, i])
            for left, right in zip(view.step(actions), pool.step(actions), strict=True):
                np.testing.assert_array_equal(left, right)


def test_drawn_places_change_seats_at_each_first_and_only_there():
    rows = {"a": [0, 2, 4, 6], "b": [1, 3, 5, 7]}
    with shared(rows, 8, rng=np.random.default_rng(3), length=3) as division:
        a, b = division.views["a"], division.views["b"]
        seats, _ = a.reset().observation[:, 0], b.reset()
        met = set()
        for step in range(1, 41):
            a.send(np.full(4, 1))
            b.send(np.full(4, 2))
            mine, theirs = a.recv(), b.recv()
            if step % 4:  # within an episode of three steps
                np.testing.assert_array_equal(mine.observation[:, 0], seats)
                np.testing.assert_array_equal(mine.reward, 10 * seats + 1)
                np.testing.assert_array_equal(theirs.reward, 10 * (1 - seats) + 2)
            seats = mine.observation[:, 0]
            np.testing.assert_array_equal(theirs.observation[:, 0], 1 - seats)
            # Place i stays in game i.
            np.testing.assert_array_equal(mine.observation[:, 2], [0, 2, 4, 6])
            met.add(tuple(seats))
        assert len(met) > 5


def test_a_reset_in_the_middle_is_one_for_all_views():
    with shared({"a": [0, 2], "b": [1, 3]}, length=9) as division:
        a, b = division.views["a"], division.views["b"]
        for _ in range(2):
            a.reset()
            b.reset()
            a.send(np.array([1, 2]))
            b.send(np.array([3, 4]))
            assert a.recv().observation[0, 1] == b.recv().observation[0, 1] == 1


@pytest.mark.parametrize("rows", [{"a": [0, 1]}, {"a": [0, 1, 2, 3], "b": [3]}, {"a": [0]}])
def test_each_row_has_one_view(rows):
    with pytest.raises(ValueError, match="each of the 4 rows"), shared(rows):
        pass


def test_steps_out_of_order_are_refused():
    with shared({"a": [0, 2], "b": [1, 3]}) as division:
        a, b = division.views["a"], division.views["b"]
        with pytest.raises(RuntimeError, match="reset must come first"):
            a.send(np.zeros(2, np.int64))
        a.reset()
        b.reset()
        a.send(np.zeros(2, np.int64))
        with pytest.raises(RuntimeError, match="b did not"):
            a.recv()
        with pytest.raises(RuntimeError, match="recv after a send"):
            a.send(np.zeros(2, np.int64))
        with pytest.raises(ValueError, match="2 rows, one for each place of b"):
            b.send(np.zeros(3, np.int64))
        with pytest.raises(ValueError, match=r"action: must be in \[0, 9\]|got"):
            b.send(np.array([10, 0]))


def test_places_are_dealt_when_a_game_begins_and_not_when_a_seat_leaves():
    with SyncEnv(UnequalSeats, 8, "for_loop", options={"length": 4}) as pool:
        rows = {"a": [0, 2, 4, 6], "b": [1, 3, 5, 7]}
        division = SharedPool(pool, rows, 2, np.random.default_rng(0))
        views, dealt, begins = division.views.values(), [], []
        for view in views:
            view.reset()
        for _ in range(15):
            dealt.append(division.rows_of("a").tolist())
            begins.append(division.begins.all())
            for view in views:
                view.send(np.zeros(4, np.int64))
            for view in views:
                view.recv()
    assert begins == [step % 5 == 0 for step in range(15)]
    changed = [step for step in range(1, 15) if dealt[step] != dealt[step - 1]]
    assert changed and set(changed) <= {5, 10}
