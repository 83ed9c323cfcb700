"""Starts supervisors, and ends them with the test."""

import pytest

from tests.programs.program.supervised import Supervised


@pytest.fixture
def start(tmp_path):
    made = []

    def start(*args, **kwargs):
        made.append(Supervised(tmp_path, *args, **kwargs))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        one.process.stderr.close()
