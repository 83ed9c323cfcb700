"""Rates of nodes that report at different moments, and grants of frames.

With grants, actors end within one unroll of the budget, and report rarely.
"""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.programs.session.frames import FrameBudget, FrameRates


def test_there_is_no_rate_before_there_are_frames():
    rates = FrameRates()
    assert rates.of("actor/0", 1.0) == 0.0
    rates.count("actor/0", 0, 1.0)
    assert rates.of("actor/0", 1.0) == rates.of("actor/0", 5.0) == rates.of("actor/1", 5.0) == 0.0


def test_the_time_before_the_first_frames_does_not_count():
    rates = FrameRates()
    for moment in range(60):  # a minute of compilation
        rates.count("actor/0", 0, float(moment))
    rates.count("actor/0", 50, 59.5)
    assert rates.of("actor/0", 60.0) == pytest.approx(50.0)


def test_a_node_that_stands_still_falls_to_0_and_the_others_keep_their_rates():
    rates = FrameRates()
    for tick in range(400):
        now = 0.1 * tick
        rates.count("actor/0", 10 if tick < 200 else 0, now)
        rates.count("actor/1", 5, now)
        if tick == 199:
            assert rates.of("actor/0", now) == pytest.approx(100.0, rel=0.02)
    assert rates.of("actor/0", now) == 0.0
    assert rates.of("actor/1", now) == pytest.approx(50.0, rel=0.02)
    # Without any report, too.
    assert rates.of("actor/1", now + 1000.0) < 1.0


def simulate(frames, unroll, speeds, period=0.2, pause=0.01):
    """Actors act, one unroll in ``unroll / speed`` seconds; returns (made, reports) of each."""
    budget = FrameBudget(frames, unroll)
    made = [0] * len(speeds)
    told, granted, due = list(made), [0] * len(speeds), [0.0] * len(speeds)
    reports = [0] * len(speeds)
    queue = [(0.0, actor) for actor in range(len(speeds))]
    while queue:
        now, actor = heapq.heappop(queue)
        if made[actor] >= granted[actor] or now >= due[actor]:
            told[actor] = made[actor]
            reports[actor] += 1
            due[actor] = now + period
            if sum(told) >= frames:
                continue  # this actor ends
            name = f"actor/{actor}"
            granted[actor] = budget.grant(name, made[actor], sum(told), now)
        if made[actor] < granted[actor]:
            made[actor] += 1
            heapq.heappush(queue, (now + 1 / speeds[actor], actor))
        else:
            heapq.heappush(queue, (now + pause, actor))
    return made, reports


@settings(max_examples=60, deadline=None)
@given(
    frames=st.integers(1, 4000),
    unroll=st.integers(1, 256),
    speeds=st.lists(st.sampled_from([50.0, 700.0, 10_000.0]), min_size=1, max_size=5),
)
def test_a_run_ends_within_one_unroll_of_each_actor(frames, unroll, speeds):
    made, _ = simulate(frames, unroll, speeds)
    assert frames <= sum(made) <= frames + unroll * len(speeds)


def test_far_from_the_end_actors_report_as_often_as_without_grants():
    made, reports = simulate(60_000, 256, [10_000.0, 9000.0, 1000.0])
    seconds = made[0] / 10_000.0
    assert max(reports) < seconds / 0.2 + 20


def test_a_silent_actor_is_not_waited_for():
    budget = FrameBudget(1000, 10)
    assert budget.grant("actor/0", 0, 0, 0.0) == 10
    assert budget.grant("actor/0", 400, 400, 0.1) == 400 + 300
    assert budget.grant("actor/1", 0, 400, 0.1) == 10
    assert budget.grant("actor/1", 300, 700, 0.2) == 300  # actor 0 may use up the budget
    assert budget.grant("actor/1", 300, 700, 5.0) == 300 + 10


def test_a_restarted_actor_gives_its_grant_back():
    budget = FrameBudget(1000, 10)
    budget.grant("actor/0", 400, 400, 0.1)
    assert budget.grant("actor/0", 0, 400, 0.2) == 10
    assert budget.grant("actor/1", 200, 600, 0.3) == 200 + 195
