"""Programs that are disturbed at random for five minutes reach a result; see `chaos`."""

import pytest

from tests.programs.faults.chaos import Chaos
from tests.programs.running import TOPOLOGIES

pytestmark = [pytest.mark.timeout(1500, method="thread")]


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_random_faults_lose_nothing_and_hang_nothing(tmp_path, topology):
    report = Chaos(topology, minutes=5, seed=1, directory=tmp_path).run()
    assert report["wrong"] == []
    assert sum(report["faults"].values()) >= 10
