"""A node's client of the coordinator."""

import os
import threading
import time

import numpy as np
import pytest

from rlstack.programs.program import base
from rlstack.programs.program.base import OVER, RUNNING, SAVING, CoordinatorClient, ProgramState
from rlstack.programs.program.stopping import EndedEarlyError, NodeLostError
from rlstack.programs.program.supervisor import INCARNATION
from rlstack.rpc import RemoteError, StoppedError, UnavailableError


class Clock:
    """A replacement for the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Far:
    """A coordinator that can be unreachable."""

    def __init__(self, clock, patience=0.0):
        self.reports, self.away, self.answer = [], False, ProgramState()
        self.sent = []  # also what got no answer
        self._clock, self._patience = clock, patience

    def report(self, node, incarnation, pid, counts, gauges, logs, batch, number):
        self.sent.append((logs, batch))
        if self.away:
            self._clock.now += self._patience  # the time that a call takes to reach its deadline
            raise UnavailableError("coordinator.report: no answer")
        self.reports.append((node, incarnation, pid, dict(counts), gauges, logs))
        return self.answer._asdict()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(base, "time", clock)
    return clock


def make(clock, stop=None, **kwargs):
    far = Far(clock, **kwargs)
    return far, CoordinatorClient(far, "actor/3", stop or threading.Event())


def test_the_first_poll_reports_and_then_a_few_a_second(clock):
    far, client = make(clock)
    for _ in range(100):
        client.poll()
        clock.now += 0.01
    assert 4 <= len(far.reports) <= 6
    before = len(far.reports)
    client.poll(now=True)
    assert len(far.reports) == before + 1


def test_a_report_holds_name_counts_gauges_and_logs(clock):
    far, client = make(clock)
    client.count(env_frames=12)
    client.log({"actor/episode_return": np.array([1.0, 2.0])})
    client.log({"actor/episode_return": np.array([3.0])})
    client.log({"loss": np.float32(0.5)}, "learner/")
    client.log(None)
    client.gauges = lambda: {"replay/size": np.int64(8)}
    client.poll()
    node, incarnation, pid, counts, gauges, logs = far.reports[0]
    assert (node, incarnation, pid, counts) == ("actor/3", 0, os.getpid(), {"env_frames": 12})
    assert gauges == {"replay/size": 8.0}
    assert logs["actor/episode_return"].tolist() == [1.0, 2.0, 3.0]
    assert logs["learner/loss"].tolist() == [0.5]
    client.poll(now=True)
    assert far.reports[1][3:] == (
        {"env_frames": 12},
        {"replay/size": 8.0},
        {},
    )  # totals are sent again, logs are not


def test_logs_without_an_answer_are_sent_again_under_the_same_number(clock):
    far, client = make(clock)
    client.log({"return": 1.0})
    far.away = True
    client.poll(now=True)
    client.log({"return": 2.0})
    client.poll(now=True)
    far.away = False
    client.log({"return": 3.0})
    client.report_end()
    sent = [(logs.get("return", np.zeros(0)).tolist(), batch) for logs, batch in far.sent]
    assert sent == [([1.0], 1), ([1.0], 1), ([1.0], 1), ([2.0, 3.0], 2)]
    client.poll(now=True)
    assert far.sent[-1] == ({}, 2)


@pytest.mark.parametrize(("node", "shown"), [("learner", 1), ("actor/0", 1), ("actor/1", 0)])
def test_a_long_phase_is_shown_once_for_all_nodes_of_a_kind(monkeypatch, node, shown):
    monkeypatch.setattr(base.timing, "PHASE_SHOWN", 0.05)
    notes = []

    class Listener:
        def note(self, node, text):
            notes.append((node, text))

    client = CoordinatorClient(Listener(), node, threading.Event())
    with client.phase("compiling"):
        time.sleep(0.3)
    with client.phase("waiting"):
        pass
    time.sleep(0.1)
    assert notes == [(node, "compiling ...")] * shown


def test_the_state_is_returned_and_remembered_between_reports(clock):
    far, client = make(clock)
    far.answer = ProgramState(SAVING, 500, 2, 1)
    assert client.poll() == ProgramState(SAVING, 500, 2, 1)
    far.answer = ProgramState(OVER, 510, 2, 1)
    assert client.poll().phase == SAVING
    clock.now += 1.0
    assert client.poll().phase == OVER


def test_a_short_absence_of_the_coordinator_changes_nothing(clock):
    far, client = make(clock)
    client.poll()
    far.away = True
    for _ in range(15):
        clock.now += 0.3
        assert client.poll().phase == RUNNING
    far.away = False
    clock.now += 0.3
    assert client.poll().phase == RUNNING
    far.away = True
    for _ in range(15):
        clock.now += 0.3
        assert client.poll().phase == RUNNING  # the coordinator has answered in between


def test_a_coordinator_that_is_stopped_for_fifteen_seconds_is_waited_for(clock):
    far, client = make(clock, patience=10.0)
    client.poll()
    far.away = True
    clock.now += 0.3
    assert [client.poll(now=True).phase for _ in range(2)] == [RUNNING] * 2
    far.away = False
    assert client.poll(now=True).phase == RUNNING
    client.poll()
    assert client.ran_seconds() > 20.0


@pytest.mark.parametrize("node", ["learner", "actor/3"])
def test_a_coordinator_that_stays_away_is_lost_to_the_learner_first(clock, node):
    far = Far(clock, patience=10.0)
    client = CoordinatorClient(far, node, threading.Event())
    client.poll()
    far.away = True
    calls = 0
    while client.poll(now=True).phase == RUNNING:
        calls += 1
    assert calls == (3 if node == "learner" else 4)
    far.away = False  # it is too late: the node is ending
    assert client.poll(now=True).phase == OVER
    with pytest.raises(NodeLostError, match=f"has not answered {node} for") as caught:
        base.check_end()
    assert caught.value.node == "coordinator"


def test_time_for_which_this_process_itself_was_stopped_counts_little(clock):
    far, client = make(clock)
    client.poll()
    far.away = True
    clock.now += 3600.0
    assert client.poll().phase == RUNNING


def test_a_node_may_end_only_when_it_was_told_to(clock):
    stop = threading.Event()
    far, client = make(clock, stop)
    client.poll()
    with pytest.raises(EndedEarlyError, match="actor/3 ended although the program still runs"):
        base.check_end()
    client.dismiss()
    base.check_end()
    far, client = make(clock, stop)
    far.answer = ProgramState(SAVING, 500, 2, 1)
    base.check_end()
    far, client = make(clock, stop)
    client.poll()
    stop.set()
    base.check_end()


def test_an_error_of_the_coordinator_is_not_taken_for_its_absence(clock):
    far, client = make(clock)

    def refuse(*args):
        raise RemoteError("coordinator", "report", "ValueError", "ValueError: no", "")

    far.report = refuse
    with pytest.raises(RemoteError):
        client.poll()


def test_the_stop_event_ends_the_node_at_once(clock):
    stop = threading.Event()
    far, client = make(clock, stop)
    client.poll()
    stop.set()
    assert client.poll().phase == OVER
    assert len(far.reports) == 1


def test_the_incarnation_is_the_supervisors_or_the_threads_own(clock, monkeypatch):
    monkeypatch.setenv(INCARNATION, "4")
    assert make(clock)[1].incarnation == 4
    found = []

    def in_a_thread():
        base.set_incarnation(2)
        found.append(make(clock)[1].incarnation)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert found == [2]
    assert make(clock)[1].incarnation == 4


def test_a_node_that_starts_waits_minutes_for_the_coordinators_first_answer(clock):
    far, client = make(clock, patience=10.0)
    far.away, begun = True, clock.now
    while clock.now < begun + 300.0:  # many nodes start on few cores
        assert client.poll(now=True).phase == RUNNING
    far.away = False
    assert client.poll(now=True).phase == RUNNING
    far.away, begun = True, clock.now
    while client.poll(now=True).phase == RUNNING:
        pass
    assert clock.now < begun + 60.0  # it has started since


def test_a_restarted_node_does_not_wait_as_long(clock, monkeypatch):
    monkeypatch.setenv(INCARNATION, "1")
    far, client = make(clock, patience=10.0)
    far.away, begun = True, clock.now
    while client.poll(now=True).phase == RUNNING:
        pass
    assert clock.now < begun + 60.0


def test_another_node_is_called_until_it_has_started(clock):
    _, client = make(clock)
    answers = [UnavailableError("learner.replay_name: no answer")] * 20 + ["block"]

    def call():
        clock.now += 10.0
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert client.wait_for(call) == "block"
    assert client.poll().phase == RUNNING


def test_the_wait_for_another_node_ends_with_the_program(clock):
    far, client = make(clock)

    def call():
        clock.now += 10.0
        far.answer = ProgramState(OVER)
        raise UnavailableError("learner.replay_name: no answer")

    with pytest.raises(StoppedError, match=r"actor/3: the program ended"):
        client.wait_for(call)
    base.check_end()  # it was told to end
