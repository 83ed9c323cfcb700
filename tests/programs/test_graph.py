"""Topologies as plain data: their nodes, which node calls which, and which are restarted."""

import pytest

from rlstack.programs.program.base import Setup
from rlstack.programs.program.graph import Graph, Handle
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session.run_dir import RunDir
from rlstack.types import EnvSpec
from tests.programs.running import TOPOLOGIES, ppo

ACTORS = ["actor/0", "actor/1", "actor/2"]
INFERENCERS = ["inferencer/0", "inferencer/1"]


def calls(node):
    """The nodes to which a node has handles."""
    found = []
    for argument in node.args:
        handles = argument.values() if isinstance(argument, dict) else [argument]
        found += [handle.node for handle in handles if isinstance(handle, Handle)]
    return found


@pytest.fixture(params=TOPOLOGIES)
def graph(request, tmp_path):
    experiment = ppo(
        request.param, program={"num_actors": 3, "num_inferencers": 2}, replay={"service": "reverb"}
    )
    setup = Setup(experiment, RunDir(tmp_path), EnvSpec((), ()))
    setup.__dict__["step"] = None  # so that no agent is built
    return graph_of(setup)


def test_a_topology_lists_its_nodes(graph):
    services = [] if graph.name == "heavy_env" else INFERENCERS
    replay = ["replay"] if graph.name == "distributed" else []
    names = [node.name for node in graph.nodes]
    assert names == ["coordinator", *replay, "learner", *services, *ACTORS, "evaluator"]
    restarted = {node.name for node in graph.nodes if node.restartable}
    assert restarted == {*services, *ACTORS, "evaluator"}
    kinds = {node.group: node.kind for node in graph.nodes}
    assert {group for group, kind in kinds.items() if kind == "worker"} == {"actor", "evaluator"}
    assert [group for group, kind in kinds.items() if kind == "server"] == replay


def test_nodes_call_nodes_that_were_added_before(graph):
    added = set()
    for node in graph.nodes:
        assert set(calls(node)) <= added
        assert node.name == "coordinator" or "coordinator" in calls(node)
        added.add(node.name)


def test_actors_share_the_inference_services(graph):
    called = [calls(node) for node in graph.nodes if node.group == "actor"]
    services = [[name for name in names if name in INFERENCERS] for names in called]
    expected = [[], [], []] if graph.name == "heavy_env" else [[INFERENCERS[i]] for i in (0, 1, 0)]
    assert services == expected


def test_handles_name_services_and_servers_but_not_workers():
    graph = Graph("test")
    assert graph.service("a", object) == Handle("a")
    assert graph.server("b/1", object, Handle("a"), client=str) == Handle("b/1")
    assert graph.worker("c", object) is None
    assert [node.group for node in graph.nodes] == ["a", "b", "c"]
