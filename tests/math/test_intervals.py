"""Statistics of scores and their bootstrap intervals, by hand and against rliable."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.math import intervals
from rlstack.math.intervals import bootstrap, interquartile_mean

# Scores of two methods, 8 runs of 5 tasks, by a formula with ties between the methods.
_N, _M = np.indices((8, 5))
X = (7 * _N * _N + 5 * _M + 3 * _N * _M) % 23 / 16
Y = (3 * _N * _N + 11 * _M + _N * _M) % 23 / 16
THRESHOLDS = [0.0, 0.25, 0.5, 1.0, 1.3]
# What rliable 1.2.0 gives for X (mean, median, interquartile mean, optimality gap), for X against Y
# (probability of improvement), and for X at the thresholds (performance profile).
AGGREGATES = {"mean": 0.7171875, "median": 0.71875, "iqm": 0.69375, "optimality_gap": 0.365625}
IMPROVEMENT = 0.5234375
PROFILE = [0.95, 0.775, 0.55, 0.275, 0.175]


def tasks(scores):
    """Scores [runs, tasks] as one array for each task."""
    return list(scores.T)


STATISTICS = {
    "mean": intervals.mean,
    "median": intervals.median,
    "iqm": intervals.iqm,
    "optimality_gap": intervals.optimality_gap,
}


@pytest.mark.parametrize("name", STATISTICS)
def test_estimates_are_those_that_rliable_gave(name):
    assert STATISTICS[name](tasks(X)) == pytest.approx(AGGREGATES[name], abs=1e-12)


def test_comparisons_and_profiles_are_those_that_rliable_gave():
    found = intervals.probability_of_improvement(tasks(X), tasks(Y))
    assert found == pytest.approx(IMPROVEMENT, abs=1e-12)
    np.testing.assert_allclose(intervals.performance_profile(tasks(X), THRESHOLDS), PROFILE)


def test_rliable_itself_gives_these_estimates_and_intervals():
    """Runs where rliable is installed, which no extra asks for."""
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    for name, theirs in (
        ("mean", metrics.aggregate_mean),
        ("median", metrics.aggregate_median),
        ("iqm", metrics.aggregate_iqm),
        ("optimality_gap", metrics.aggregate_optimality_gap),
    ):
        points, ends = library.get_interval_estimates({"x": X}, theirs, reps=20_000)
        ours = intervals.interval(STATISTICS[name], tasks(X))
        assert ours.estimate == pytest.approx(points["x"]) == pytest.approx(AGGREGATES[name])
        np.testing.assert_allclose([ours.low, ours.high], np.ravel(ends["x"]), atol=0.015)
    points, ends = library.get_interval_estimates(
        {"x,y": (X, Y)}, metrics.probability_of_improvement, reps=2_000
    )
    ours = intervals.interval(intervals.probability_of_improvement, tasks(X), tasks(Y))
    assert ours.estimate == pytest.approx(points["x,y"]) == pytest.approx(IMPROVEMENT)
    np.testing.assert_allclose([ours.low, ours.high], np.ravel(ends["x,y"]), atol=0.015)
    profile, ends = library.create_performance_profile({"x": X}, np.array(THRESHOLDS))
    np.testing.assert_allclose(profile["x"], PROFILE)
    ours = intervals.band(
        lambda scores: intervals.performance_profile(scores, THRESHOLDS), tasks(X)
    )
    np.testing.assert_allclose([ours.low, ours.high], ends["x"], atol=0.026)  # a step is 1/40


def test_the_middle_half():
    assert interquartile_mean([1.0, 100.0, 3.0, 5.0]) == 4.0
    assert interquartile_mean([1.0, 100.0, 3.0]) == pytest.approx(104 / 3)
    values = np.random.default_rng(0).normal(size=(2, 40))
    np.testing.assert_allclose(interquartile_mean(values), np.sort(values)[:, 10:30].mean(axis=1))


def test_tasks_with_different_numbers_of_runs():
    scores = [np.array([0.0, 2.0]), np.array([3.0, 3.0, 3.0, 7.0]), np.array([0.5])]
    assert intervals.mean(scores) == pytest.approx((1 + 4 + 0.5) / 3)
    assert intervals.median(scores) == 1
    assert intervals.median(scores[1:2]) == 3
    assert intervals.iqm(scores) == pytest.approx((0.5 + 2 + 3 + 3 + 3) / 5)
    assert intervals.optimality_gap(scores) == pytest.approx(1 - (0.5 + 1 + 0.5) / 3)
    other = [np.array([1.0]), np.array([3.0]), np.array([1.0])]
    found = intervals.probability_of_improvement(scores, other)
    assert found == pytest.approx((1 / 2 + (1 + 3 / 2) / 4 + 0) / 3)
    with pytest.raises(ValueError, match="3 and 1 tasks"):
        intervals.probability_of_improvement(scores, other[:1])


def test_the_interval_covers_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(100):
        found = bootstrap(rng.normal(size=30))
        covered += found.low <= 0 <= found.high
    assert 85 <= covered <= 99


def test_runs_are_drawn_within_their_task():
    """Tasks whose runs are all equal have no uncertainty, whatever their scores."""
    scores = [np.full(4, 1.0), np.full(3, 50.0)]
    for statistic in STATISTICS.values():
        found = intervals.interval(statistic, scores, resamples=200)
        assert found.low == found.estimate == found.high


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_the_estimate_is_inside_and_repeatable(values):
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert min(values) - 1e-6 <= found.low <= found.high <= max(values) + 1e-6


_RUNS = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=5).map(np.array)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(_RUNS, _RUNS), min_size=1, max_size=3))
def test_improvements_of_both_methods_add_up_to_one(pairs):
    x, y = ([pair[side] for pair in pairs] for side in (0, 1))
    forth = intervals.probability_of_improvement(x, y)
    assert forth + intervals.probability_of_improvement(y, x) == pytest.approx(1)
    found = intervals.interval(intervals.probability_of_improvement, x, y, resamples=100)
    assert 0 <= found.low <= found.high <= 1
    profile = intervals.band(lambda s: intervals.performance_profile(s, range(-4, 5)), x)
    assert np.all(np.diff(profile.estimate) <= 0)
    assert profile.estimate[0] == 1
    assert profile.estimate[-1] == 0


def test_no_values_are_refused():
    with pytest.raises(ValueError, match=r"\[N\] with N >= 1"):
        bootstrap([])
    with pytest.raises(ValueError, match=r"\[N\] with N >= 1"):
        intervals.interval(intervals.mean, [])


def test_wilsons_interval_by_hand():
    found = intervals.wilson(0.8, 10)
    assert found.estimate == 0.8
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    none, all_ = intervals.wilson(0.0, 10), intervals.wilson(1.0, 10)
    assert none.low == 0.0 and none.high == pytest.approx(0.2775, abs=1e-4)
    assert all_.high == 1.0 and all_.low == pytest.approx(1 - none.high)
    assert intervals.wilson(0.5, 1000).low > intervals.wilson(0.5, 10).low
    for score, number in ((0.5, 0), (1.1, 3)):
        with pytest.raises(ValueError, match="number must be at least 1, and score in"):
            intervals.wilson(score, number)
