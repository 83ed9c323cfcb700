"""When a round is ready and which items it has: first the rule alone, then in a buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.replay import InProcessReplay, ReplayTimeoutError, memory, table
from rlstack.replay.rounds import Reports, Rounds
from tests.replay.replay_model import LAST, MID, config, drawn, feed, make_transition


def decide(rounds, items, newest, now):
    """Items are (env, version) pairs, oldest first."""
    envs, versions = (np.array(column, np.int64) for column in zip(*items, strict=True))
    return rounds.decide(envs, versions, newest, now)


def test_all_actors_need_no_grace():
    rounds = Rounds(min_actors=1, grace_seconds=5.0, num_actors=2, num_envs=4)
    assert decide(rounds, [(0, 3), (2, 3), (3, 3)], 3, 0.0) is None
    went = decide(rounds, [(0, 3), (2, 3), (3, 3), (1, 3)], 3, 0.1)
    assert (went.take.tolist(), went.actors, went.late) == ([0, 1, 2, 3], 2, 0)


def test_grace_runs_from_the_moment_that_enough_have_reported():
    rounds = Rounds(min_actors=2, grace_seconds=1.0, num_actors=3, num_envs=3)
    assert decide(rounds, [(0, 1)], 1, 0.0) is None and not rounds.waits_for_time
    assert decide(rounds, [(0, 1), (2, 1)], 1, 10.0) is None and rounds.waits_for_time
    assert decide(rounds, [(0, 1), (2, 1)], 1, 10.9) is None
    went = decide(rounds, [(0, 1), (2, 1)], 1, 11.0)
    assert went.take.tolist() == [0, 1] and went.actors == 2
    rounds.start_over()
    assert decide(rounds, [(0, 1), (2, 1)], 1, 12.0) is None  # each round has its own grace


def test_a_newer_version_takes_the_reports_back():
    rounds = Rounds(min_actors=1, grace_seconds=1.0, num_actors=2, num_envs=2)
    assert decide(rounds, [(0, 1)], 1, 0.0) is None
    assert decide(rounds, [(0, 1)], 2, 5.0) is None
    assert decide(rounds, [(0, 1), (1, 2)], 2, 6.0) is None  # the grace period restarts
    went = decide(rounds, [(0, 1), (1, 2)], 2, 7.0)
    assert (went.take.tolist(), went.actors, went.late) == ([0, 1], 1, 1)


def test_what_is_over_a_multiple_waits_but_never_what_was_reported():
    rounds = Rounds(min_actors=1, grace_seconds=0.0, num_actors=2, num_envs=4)
    items = [(2, 0), (0, 1), (0, 1), (1, 1)]
    assert decide(rounds, items, 1, 0.0).take.tolist() == [0, 1, 2, 3]
    assert decide(rounds, items[1:], 1, 0.0).take.tolist() == [0, 2]
    assert decide(rounds, [(0, 0), (0, 1), (1, 1)], 1, 0.0).take.tolist() == [1, 2]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_round_is_fair(data):
    num_actors, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    min_actors, num_envs = data.draw(st.integers(1, num_actors)), num_actors * size
    item = st.tuples(st.integers(0, num_envs - 1), st.integers(0, 2))
    items = data.draw(st.lists(item, min_size=1, max_size=24))
    rounds = Rounds(min_actors, 1.0, num_actors, num_envs)
    reported = [
        actor
        for actor in range(num_actors)
        if all((env, 2) in items for env in range(actor * size, (actor + 1) * size))
    ]
    at_once = decide(rounds, items, 2, 0.0)
    assert (at_once is not None) == (len(reported) == num_actors)
    went = decide(rounds, items, 2, 1.0)
    assert (went is not None) == (len(reported) >= min_actors)
    if went is None:
        return
    taken = [items[i] for i in went.take]
    assert went.actors == len(reported) and len(taken) % size == 0
    assert went.late == sum(version < 2 for _, version in taken)
    may = [i for i, (env, version) in enumerate(items) if version < 2 or env // size in reported]
    assert set(went.take.tolist()) <= set(may) and len(may) - len(taken) < size
    for actor in reported:
        assert all((env, 2) in taken for env in range(actor * size, (actor + 1) * size))


def rounds_config(**changes):
    return config("fifo", **{"max_size": 64, "min_actors": 2, "grace_seconds": 1.0, **changes})


def add_item(buffer, envs, turn, version):
    """Adds the steps (unroll_length 3) that complete item ``turn`` of the given environments."""
    for step in range(3 * turn + (turn > 0), 3 * turn + 4):
        n = len(envs)
        buffer.add(np.array(envs), make_transition(envs, [step] * n, [MID] * n, [version] * n))


def test_rounds_in_process(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(table.time, "monotonic", lambda: now[0])
    buffer = InProcessReplay(rounds_config(max_staleness=1), 6, seed=0, num_actors=3)
    add_item(buffer, [0, 1, 2], 0, 0)
    with pytest.raises(ReplayTimeoutError, match=r"min_actors \(2\) must have an item"):
        buffer.sample(timeout=0)
    add_item(buffer, [3], 0, 0)
    assert not buffer.can_sample()
    now[0] = 1.0
    assert drawn(buffer.sample()) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert (buffer.stats()["round_actors"], buffer.stats()["late"]) == (2, 0)
    buffer.set_params_version(1)
    add_item(buffer, [4, 5], 0, 0)  # too late for its round, but fresh enough for the next
    add_item(buffer, [0, 1, 2, 3], 1, 1)
    assert not buffer.can_sample()
    now[0] = 2.5
    assert sorted(drawn(buffer.sample())) == [(0, 3), (1, 3), (2, 3), (3, 3), (4, 0), (5, 0)]
    assert (buffer.stats()["round_actors"], buffer.stats()["late"]) == (2, 2)
    assert buffer.stats()["lag_max"] == 1
    buffer.set_params_version(2)
    add_item(buffer, [0, 1], 2, 0)
    assert not buffer.can_sample() and buffer.stats()["dropped_stale"] == 2


def test_all_actors_make_a_round_in_lock_step():
    buffer = InProcessReplay(rounds_config(), 4, seed=0, num_actors=2)
    feed(buffer, 4, 0, 4)
    assert [len(s.keys) for s in buffer.make_dataset()] == [4]
    feed(buffer, 4, 4, 10)
    assert [len(s.keys) for s in buffer.make_dataset()] == [8]


def test_rounds_that_could_never_go_are_refused():
    with pytest.raises(ValueError, match=r"min_actors must be at most num_actors \(1\)"):
        InProcessReplay(rounds_config(), 4, seed=0)
    with pytest.raises(ValueError, match="num_envs must be a multiple of num_actors"):
        InProcessReplay(rounds_config(), 4, seed=0, num_actors=3)


def test_more_than_the_memory_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000)
    with pytest.raises(ValueError, match=r"must fit into what is free of memory; got 10,000"):
        feed(InProcessReplay(config(max_size=1000), 4, seed=0), 4, 0, 1)
    feed(InProcessReplay(config(max_size=8), 4, seed=0), 4, 0, 1)


def test_a_full_round_takes_what_there_is():
    rounds = Rounds(min_actors=2, grace_seconds=1.0, num_actors=2, num_envs=4)
    items = [(0, 0), (2, 0), (2, 1), (0, 1), (0, 1)]
    assert decide(rounds, items, 1, 0.0) is None
    envs, versions = (np.array(column, np.int64) for column in zip(*items, strict=True))
    went = rounds.decide(envs, versions, 1, 0.0, full=True)
    assert (went.take.tolist(), went.actors, went.late) == ([0, 1, 2, 3], 0, 2)
    went = rounds.decide(envs[:1], versions[:1], 1, 0.0, full=True)
    assert went.take.tolist() == [0]  # less than an actor's environments, but all there is


def report(reports, buffer, envs, step, version, step_type=MID):
    """Adds a step to both; returns whether it has completed a report."""
    n = len(envs)
    transition = make_transition(envs, [step] * n, [step_type] * n, [version] * n)
    buffer.add(np.array(envs), transition)
    return reports.add(np.array(envs), transition)


def test_an_actor_knows_of_its_own_report_what_the_learner_knows():
    cfg = rounds_config(min_actors=1, grace_seconds=0.0, starts="not_last", context=1)
    reports, buffer = Reports(cfg, 2), InProcessReplay(cfg, 2, seed=0)
    versions = [0, 0, 4, 4, 5, 5, 6, 6, 7, 7, 8]  # items are 0..3, 3..6, 6..9
    told = [report(reports, buffer, [0, 1], t, versions[t]) for t in range(4)]
    assert told == [False, False, False, True] and reports.version == 4
    # The next item of environment 1 starts (after its context) at the end of an episode.
    for t in range(4, 7):
        step_type = LAST if t == 4 else MID
        assert not report(reports, buffer, [1], t, versions[t], step_type)
        assert report(reports, buffer, [0], t, versions[t]) is False
    assert reports.version == 4
    for t in range(7, 10):
        complete = report(reports, buffer, [1], t, versions[t])
    assert complete and reports.version == 5  # of environment 0, which is behind
    assert buffer.stats()["inserts"] == 4


@pytest.mark.slow
@pytest.mark.chosen
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_report_is_what_makes_a_round_ready(data):
    """An actor that stops at each report until there is a newer version never adds in vain."""
    num_envs = data.draw(st.integers(1, 3))
    cfg = rounds_config(min_actors=1, grace_seconds=0.0, unroll_length=2)
    reports, buffer = Reports(cfg, num_envs), InProcessReplay(cfg, num_envs, seed=0)
    newest, steps = 0, [0] * num_envs
    buffer.set_params_version(0)
    for _ in range(60):
        envs = sorted(data.draw(st.sets(st.integers(0, num_envs - 1), min_size=1)))
        steps_now = [steps[env] for env in envs]
        n = len(envs)
        transition = make_transition(envs, steps_now, [MID] * n, [newest] * n)
        for env in envs:
            steps[env] += 1
        buffer.add(np.array(envs), transition)
        reports.add(np.array(envs), transition)
        assert (reports.version >= newest) == buffer.can_sample()
        if buffer.can_sample():
            buffer.sample()
            newest += 1
            buffer.set_params_version(newest)
    assert buffer.stats()["dropped"] == 0
