"""The budget of updates in programs of several nodes."""

import pytest

from tests.programs.running import nothing_left, ppo, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chosen,
    pytest.mark.timeout(120, method="thread"),
]


@pytest.mark.parametrize("pacing", ["asynchronous", "lock_step"])
def test_a_program_makes_exactly_its_updates(tmp_path, pacing):
    experiment = ppo("heavy_env", frames=10**6, updates=5, program={"pacing": pacing})
    with nothing_left():
        result = run(experiment, tmp_path / "run")
    assert (result.learner_steps, result.ended_by) == (5, "updates")
