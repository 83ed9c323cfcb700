"""Rates of nodes that report at different moments."""

import pytest

from rlstack.programs.session.profiling.rates import FrameRates


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
