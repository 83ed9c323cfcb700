"""Lock-step: actors and the learner, round after round."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from programs.nodes.meeting import ACT, ATTEND, STOP, Meeting

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_the_learner_learns_while_all_actors_wait_and_nobody_runs_ahead(pool):
    meeting, events, lock = Meeting(3), [], threading.Lock()

    def act(rank):
        attended = -1
        for done in range(1, 6):
            with lock:
                events.append(("act", done))
            word, attended = meeting.attend(rank, 0, 10 * done, attended, 5.0)
            assert word == (ACT if done < 5 else STOP)

    actors = [pool.submit(act, rank) for rank in range(3)]
    for done in range(1, 6):
        assert meeting.wait(5.0) == 30 * done
        with lock:
            events.append(("learn", done))
        meeting.dismiss(go_on=done < 5)
    for actor in actors:
        actor.result(5.0)
    expected = [(what, n) for n in range(1, 6) for what in ("act",) * 3 + ("learn",)]
    assert events == expected


def test_the_learner_waits_no_longer_than_told():
    meeting = Meeting(2)
    meeting.attend(0, 0, 10, -1, 0.0)
    begun = time.monotonic()
    assert meeting.wait(0.1) is None
    assert 0.05 < time.monotonic() - begun < 2.0


def test_an_actor_that_waited_in_vain_asks_again_and_counts_once(pool):
    meeting = Meeting(2)
    word, attended = meeting.attend(0, 0, 10, -1, 0.01)
    assert word == ATTEND
    again = pool.submit(meeting.attend, 0, 0, 10, attended, 5.0)
    other = pool.submit(meeting.attend, 1, 0, 7, -1, 5.0)
    assert meeting.wait(5.0) == 17
    meeting.dismiss(go_on=True)
    assert again.result(5.0) == other.result(5.0) == (ACT, 1)


def test_a_repeated_call_whose_round_has_ended_is_answered_at_once(pool):
    meeting = Meeting(1)
    lost = pool.submit(meeting.attend, 0, 0, 10, -1, 5.0)
    assert meeting.wait(5.0) == 10
    meeting.dismiss(go_on=True)
    assert lost.result(5.0) == (ACT, 1)
    # Its second round's answer is lost on the way: it asks for that round again.
    lost = pool.submit(meeting.attend, 0, 0, 20, 1, 5.0)
    assert meeting.wait(5.0) == 20
    meeting.dismiss(go_on=True)
    lost.result(5.0)
    assert meeting.attend(0, 0, 20, 1, 0.0) == (ACT, 2)
    assert meeting.wait(0.01) is None  # and so it is not taken for an arrival in the third


def test_a_killed_actor_comes_back_into_the_round_that_runs(pool):
    meeting = Meeting(2)
    rounds = [pool.submit(meeting.attend, rank, 0, 10, -1, 5.0) for rank in (0, 1)]
    assert meeting.wait(5.0) == 20
    meeting.dismiss(go_on=True)
    assert [r.result(5.0) for r in rounds] == [(ACT, 1), (ACT, 1)]
    # Actor 1 is killed and starts again, from 0 frames; actor 0 has been waiting for it.
    waits = pool.submit(meeting.attend, 0, 0, 20, 1, 5.0)
    assert meeting.wait(0.05) is None
    returned = pool.submit(meeting.attend, 1, 1, 4, -1, 5.0)
    assert meeting.wait(5.0) == 20 + 10 + 4  # of its first life too
    meeting.dismiss(go_on=True)
    assert waits.result(5.0) == returned.result(5.0) == (ACT, 2)


def test_an_actor_killed_while_it_waits_is_not_counted_twice(pool):
    meeting = Meeting(2)
    meeting.attend(1, 0, 10, -1, 0.0)  # killed here
    returned = pool.submit(meeting.attend, 1, 1, 3, -1, 5.0)
    assert meeting.wait(0.05) is None  # actor 0 is missing, however often actor 1 comes
    other = pool.submit(meeting.attend, 0, 0, 10, -1, 5.0)
    assert meeting.wait(5.0) == 23
    meeting.dismiss(go_on=False)
    assert returned.result(5.0)[0] == other.result(5.0)[0] == STOP


def test_closing_sends_everybody_home(pool):
    meeting = Meeting(2)
    waits = pool.submit(meeting.attend, 0, 0, 10, -1, 20.0)
    time.sleep(0.05)
    meeting.close()
    assert waits.result(2.0)[0] == STOP
    assert meeting.attend(1, 0, 10, -1, 20.0)[0] == STOP
