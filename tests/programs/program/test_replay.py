"""The processors that a node's process uses."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlstack.programs.program.replay import leave_one_core


@pytest.mark.parametrize(("allowed", "left"), [({0, 1}, {1}), ({2, 3, 5}, {3, 5}), ({4}, {4})])
def test_one_of_several_processors_is_left_to_others(monkeypatch, allowed, left):
    taken = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: taken.append(to), raising=False)
    leave_one_core()
    assert (taken or [allowed]) == [left]


def test_a_system_that_cannot_do_it_is_left_alone(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    leave_one_core()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot do it")
def test_threads_started_later_leave_it_too():
    def later():
        leave_one_core()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(os.sched_getaffinity, 0).result(), os.sched_getaffinity(0)

    before = os.sched_getaffinity(0)
    with ThreadPoolExecutor(1) as pool:  # this thread keeps its own cores
        inherited, own = pool.submit(later).result()
    assert inherited == own == (before - {min(before)} or before)
    assert os.sched_getaffinity(0) == before
