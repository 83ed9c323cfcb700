"""A run says what it is doing before its first frames."""

import contextlib

from rlstack.programs.run.run_session import drive
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.storage.loggers import InMemoryLogger
from tests.programs.running import ppo


def test_a_single_process_names_what_may_take_long():
    phases = []

    @contextlib.contextmanager
    def phase(text):
        phases.append(text)
        yield

    experiment = ppo("single_process", frames=1000)
    loop = SingleProcessRun(experiment, phase)
    periodic = PeriodicActions(
        experiment, InMemoryLogger(), evaluate=lambda _: None, checkpoint=lambda _: None
    )
    try:
        drive(loop, periodic, lambda: False)
    finally:
        loop.close()
    assert loop.learner.version > 1
    assert phases == [
        "making 8 environments",
        "resetting 8 environments",
        "compiling the agent's step, and acting",
        "compiling the step of the learner",
    ]
