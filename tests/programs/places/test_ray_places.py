"""An error in a process on a host of a Ray cluster names the user's file, line and code."""

import pytest

from tests.programs.clusters import wait_until_empty
from tests.programs.places.test_places import DISTRIBUTED, NODES, check_node, ids, message

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(180, method="thread")]
# In the learner's node, a service's and an actor's.
CHOSEN = {
    case[1].slot: case for case in NODES if case[1].slot in ("loss", "actor_step", "env_step")
}


@pytest.mark.parametrize(("file", "mistake"), CHOSEN.values(), ids=ids)
def test_in_processes_of_a_cluster(tmp_path, monkeypatch, capsys, hosts, file, mistake):
    more = f"{DISTRIBUTED} --launch ray --ray-address {hosts.address}".split()
    check_node(*message(tmp_path, monkeypatch, capsys, file, mistake, *more), mistake)
    assert wait_until_empty() == []
