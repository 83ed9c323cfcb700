"""Lock-step pacing: actors and the learner work in rounds."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlstack.programs.program.lock_step import ACT, STOP, WAIT, LockStepBarrier

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_the_learner_learns_while_all_actors_wait_and_nobody_runs_ahead(pool):
    barrier, events, lock = LockStepBarrier(3), [], threading.Lock()

    def act(rank):
        round_ = -1
        for done in range(1, 6):
            with lock:
                events.append(("act", done))
            word, round_ = barrier.arrive(rank, 0, 10 * done, round_, 5.0)
            assert word == (ACT if done < 5 else STOP)

    actors = [pool.submit(act, rank) for rank in range(3)]
    for done in range(1, 6):
        assert barrier.wait_for_actors(5.0) == 30 * done
        with lock:
            events.append(("learn", done))
        barrier.release(go_on=done < 5)
    for actor in actors:
        actor.result(5.0)
    expected = [(what, n) for n in range(1, 6) for what in ("act",) * 3 + ("learn",)]
    assert events == expected


def test_the_learner_waits_no_longer_than_told():
    barrier = LockStepBarrier(2)
    barrier.arrive(0, 0, 10, -1, 0.0)
    begun = time.monotonic()
    assert barrier.wait_for_actors(0.1) is None
    assert 0.05 < time.monotonic() - begun < 2.0


def test_an_actor_that_waited_in_vain_asks_again_and_counts_once(pool):
    barrier = LockStepBarrier(2)
    word, round_ = barrier.arrive(0, 0, 10, -1, 0.01)
    assert word == WAIT
    again = pool.submit(barrier.arrive, 0, 0, 10, round_, 5.0)
    other = pool.submit(barrier.arrive, 1, 0, 7, -1, 5.0)
    assert barrier.wait_for_actors(5.0) == 17
    barrier.release(go_on=True)
    assert again.result(5.0) == other.result(5.0) == (ACT, 1)


def test_a_repeated_call_whose_round_has_ended_is_answered_at_once(pool):
    barrier = LockStepBarrier(1)
    lost = pool.submit(barrier.arrive, 0, 0, 10, -1, 5.0)
    assert barrier.wait_for_actors(5.0) == 10
    barrier.release(go_on=True)
    assert lost.result(5.0) == (ACT, 1)
    # The answer of the second round is lost, so the actor asks for that round again.
    lost = pool.submit(barrier.arrive, 0, 0, 20, 1, 5.0)
    assert barrier.wait_for_actors(5.0) == 20
    barrier.release(go_on=True)
    lost.result(5.0)
    assert barrier.arrive(0, 0, 20, 1, 0.0) == (ACT, 2)
    assert (
        barrier.wait_for_actors(0.01) is None
    )  # so it does not count as an arrival in the third round


def test_a_killed_actor_comes_back_into_the_round_that_runs(pool):
    barrier = LockStepBarrier(2)
    rounds = [pool.submit(barrier.arrive, rank, 0, 10, -1, 5.0) for rank in (0, 1)]
    assert barrier.wait_for_actors(5.0) == 20
    barrier.release(go_on=True)
    assert [r.result(5.0) for r in rounds] == [(ACT, 1), (ACT, 1)]
    # Actor 1 is killed and starts again, from 0 frames; actor 0 has been waiting for it.
    waits = pool.submit(barrier.arrive, 0, 0, 20, 1, 5.0)
    assert barrier.wait_for_actors(0.05) is None
    returned = pool.submit(barrier.arrive, 1, 1, 4, -1, 5.0)
    assert barrier.wait_for_actors(5.0) == 20 + 10 + 4  # including the frames before its restart
    barrier.release(go_on=True)
    assert waits.result(5.0) == returned.result(5.0) == (ACT, 2)


def test_an_actor_killed_while_it_waits_is_not_counted_twice(pool):
    barrier = LockStepBarrier(2)
    barrier.arrive(1, 0, 10, -1, 0.0)  # killed here
    returned = pool.submit(barrier.arrive, 1, 1, 3, -1, 5.0)
    assert barrier.wait_for_actors(0.05) is None  # actor 0 is missing; actor 1 counts only once
    other = pool.submit(barrier.arrive, 0, 0, 10, -1, 5.0)
    assert barrier.wait_for_actors(5.0) == 23
    barrier.release(go_on=False)
    assert returned.result(5.0)[0] == other.result(5.0)[0] == STOP


def test_closing_releases_all_waiting_actors(pool):
    barrier = LockStepBarrier(2)
    waits = pool.submit(barrier.arrive, 0, 0, 10, -1, 20.0)
    time.sleep(0.05)
    barrier.close()
    assert waits.result(2.0)[0] == STOP
    assert barrier.arrive(1, 0, 10, -1, 20.0)[0] == STOP


def test_with_min_actors_the_learner_goes_on_without_a_late_actor(pool):
    barrier = LockStepBarrier(3, min_actors=2, grace_seconds=0.3)
    early = [pool.submit(barrier.arrive, rank, 0, 10, -1, 5.0) for rank in (0, 1)]
    begun = time.monotonic()
    assert barrier.wait_for_actors(0.1) is None  # the grace period
    assert barrier.wait_for_actors(5.0) == 20
    assert 0.25 < time.monotonic() - begun < 3.0
    barrier.release(go_on=True)
    assert [actor.result(5.0) for actor in early] == [(ACT, 1)] * 2
    # The third actor began in the first round. It joins the second one at once.
    assert barrier.arrive(2, 0, 7, 0, 0.0) == (ACT, 1)
    assert barrier.wait_for_actors(0.0) is None
    rest = [pool.submit(barrier.arrive, rank, 0, 20, 1, 5.0) for rank in (0, 1, 2)]
    begun = time.monotonic()
    assert barrier.wait_for_actors(5.0) == 60  # all are here, so there is no grace period
    assert time.monotonic() - begun < 0.25
    barrier.release(go_on=True)
    assert [actor.result(5.0) for actor in rest] == [(ACT, 2)] * 3
