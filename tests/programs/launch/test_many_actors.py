"""Forty actor processes report together, are killed and replaced, and leave nothing behind."""

import pytest

from benchmarks import many_actors


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
def test_forty_actors_are_light_and_replaced_and_leave_nothing():
    found = many_actors.measure(actors=40, seconds=4.0, step=0.1)
    assert found.left == []
    assert found.restarts == 10 and 0 < found.lost_frames < 10 * 17
    # Each makes ten frames a second at most; an update takes 512 of them.
    assert 40 < found.frames_per_second < 40 * 10 * 1.1
    assert found.coordinator < 0.3
    assert found.actor_mb < 30  # it was 35 when actors traced the params
