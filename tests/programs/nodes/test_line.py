"""A node's line to the coordinator."""

import os
import threading

import numpy as np
import pytest

from programs.nodes import line as line_module
from programs.nodes.coordination import OVER, RUNNING, SAVING
from programs.nodes.line import Line, Orders
from programs.nodes.supervise import INCARNATION
from rlstack.rpc import RemoteError, UnavailableError


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


class Far:
    """A coordinator that can be away."""

    def __init__(self, clock, patience=0.0):
        self.reports, self.away, self.answer = [], False, Orders()
        self._clock, self._patience = clock, patience

    def report(self, node, incarnation, pid, counts, gauges, logs):
        if self.away:
            self._clock.now += self._patience  # as a call that waits for its deadline
            raise UnavailableError("coordinator.report: no answer")
        self.reports.append((node, incarnation, pid, dict(counts), gauges, logs))
        return self.answer._asdict()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(line_module, "time", clock)
    return clock


def make(clock, stop=None, **kwargs):
    far = Far(clock, **kwargs)
    return far, Line(far, "actor/3", stop or threading.Event())


def test_the_first_question_is_asked_and_then_a_few_a_second(clock):
    far, line = make(clock)
    for _ in range(100):
        line.ask()
        clock.now += 0.01
    assert 4 <= len(far.reports) <= 6
    before = len(far.reports)
    line.ask(now=True)
    assert len(far.reports) == before + 1


def test_a_report_says_who_what_and_how_much(clock):
    far, line = make(clock)
    line.count(env_frames=12)
    line.log({"actor/episode_return": np.array([1.0, 2.0])})
    line.log({"actor/episode_return": np.array([3.0])})
    line.log({"loss": np.float32(0.5)}, "learner/")
    line.log(None)
    line.gauges = lambda: {"replay/size": np.int64(8)}
    line.ask()
    node, incarnation, pid, counts, gauges, logs = far.reports[0]
    assert (node, incarnation, pid, counts) == ("actor/3", 0, os.getpid(), {"env_frames": 12})
    assert gauges == {"replay/size": 8.0}
    assert logs["actor/episode_return"].tolist() == [1.0, 2.0, 3.0]
    assert logs["learner/loss"].tolist() == [0.5]
    line.ask(now=True)
    assert far.reports[1][3:] == (
        {"env_frames": 12},
        {"replay/size": 8.0},
        {},
    )  # totals again, averages once


def test_orders_are_passed_on_and_remembered_between_reports(clock):
    far, line = make(clock)
    far.answer = Orders(SAVING, 500, 2, 1)
    assert line.ask() == Orders(SAVING, 500, 2, 1)
    far.answer = Orders(OVER, 510, 2, 1)
    assert line.ask().phase == SAVING
    clock.now += 1.0
    assert line.ask().phase == OVER


def test_a_short_absence_of_the_coordinator_changes_nothing(clock):
    far, line = make(clock)
    line.ask()
    far.away = True
    for _ in range(15):
        clock.now += 0.3
        assert line.ask().phase == RUNNING
    far.away = False
    clock.now += 0.3
    assert line.ask().phase == RUNNING
    far.away = True
    for _ in range(15):
        clock.now += 0.3
        assert line.ask().phase == RUNNING  # it has been heard since


def test_a_coordinator_that_stays_away_means_that_all_is_over(clock):
    far, line = make(clock)
    line.ask()
    far.away = True
    for _ in range(30):
        clock.now += 0.3
        line.ask()
    assert line.ask().phase == OVER


def test_the_time_that_a_vain_call_took_counts(clock):
    far, line = make(clock, patience=6.0)
    far.away = True
    assert line.ask().phase == OVER


def test_what_the_coordinator_raises_is_not_taken_for_its_absence(clock):
    far, line = make(clock)

    def refuse(*args):
        raise RemoteError("coordinator", "report", "ValueError", "ValueError: no", "")

    far.report = refuse
    with pytest.raises(RemoteError):
        line.ask()


def test_a_launcher_that_ends_the_node_is_obeyed_at_once(clock):
    stop = threading.Event()
    far, line = make(clock, stop)
    line.ask()
    stop.set()
    assert line.ask().phase == OVER
    assert len(far.reports) == 1


def test_the_incarnation_is_the_supervisors_or_the_threads_own(clock, monkeypatch):
    monkeypatch.setenv(INCARNATION, "4")
    assert make(clock)[1].incarnation == 4
    found = []

    def in_a_thread():
        line_module.set_incarnation(2)
        found.append(make(clock)[1].incarnation)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert found == [2]
    assert make(clock)[1].incarnation == 4
