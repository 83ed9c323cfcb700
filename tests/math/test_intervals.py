"""Interquartile means and their bootstrap intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstack.math.intervals import bootstrap, interquartile_mean

pytestmark = pytest.mark.one_lane


def test_the_middle_half():
    assert interquartile_mean([1.0, 100.0, 3.0, 5.0]) == 4.0
    assert interquartile_mean([1.0, 100.0, 3.0]) == pytest.approx(104 / 3)
    values = np.random.default_rng(0).normal(size=(2, 40))
    np.testing.assert_allclose(interquartile_mean(values), np.sort(values)[:, 10:30].mean(axis=1))


def test_the_interval_covers_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(100):
        found = bootstrap(rng.normal(size=30))
        covered += found.low <= 0 <= found.high
    assert 85 <= covered <= 99


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12))
def test_the_estimate_is_inside_and_repeatable(values):
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert min(values) - 1e-6 <= found.low <= found.high <= max(values) + 1e-6


def test_no_values_are_refused():
    with pytest.raises(ValueError, match=r"\[N\] with N >= 1"):
        bootstrap([])
