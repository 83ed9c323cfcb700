"""Fixtures that several tests of programs share."""

import pytest

from tests.programs.clusters import cluster


@pytest.fixture(scope="module")
def hosts():
    """A head and three workers."""
    with cluster(workers=3) as made:
        yield made
