"""Nodes and hosts of different versions refuse one another, and name both versions."""

import types

import pytest

from programs.launchers.ray_nodes import RayNodes
from programs.launchers.ray_runner import Placement
from rlstack.rpc import RemoteError, RemoteObject, Service, codec, remote, serve, versions

pytestmark = pytest.mark.timeout(60)


class Node:
    """A node."""

    @remote()
    def ask(self):
        """Answers."""
        return 5


def test_equal_and_unknown_versions_fit():
    assert versions.differences(versions.own(), "there") == ""
    assert versions.differences(b"", "there") == ""
    assert versions.differences(b"1.2 1", "there", b"1.2 1") == ""
    assert versions.differences(b"unknown 1", "there", b"1.2 1") == ""


@pytest.mark.parametrize("theirs", [b"1.3 1", b"1.2 2", b"unknown 2", b"1.3", b"\xff\xff"])
def test_others_are_named(theirs):
    text = versions.differences(theirs, "host 10.0.0.2", b"1.2 1")
    assert "host 10.0.0.2 has" in text and "this process has 1.2 with version 1" in text
    assert theirs.decode(errors="replace").split()[0] in text


def test_a_service_answers_only_callers_of_its_version():
    service = Service(Node())
    assert codec.decode(service.rpc_hello(versions.own()))[0] == 0
    refused = service.rpc_hello(b"7.7 9")
    assert refused.startswith(versions.REFUSED) and b"7.7" in refused


@pytest.mark.reference
def test_a_caller_of_another_version_gets_an_error_with_both(monkeypatch):
    pytest.importorskip("courier")
    with serve(Node()) as server:
        node = RemoteObject(server.address, Node, name="learner")
        assert node.ask() == 5
        other = RemoteObject(server.address, Node, name="learner")
        mine = versions.own().decode().split()[0]
        others = types.SimpleNamespace(own=lambda: b"7.7 9", REFUSED=versions.REFUSED)
        monkeypatch.setattr("rlstack.rpc.calls.versions", others)
        with pytest.raises(RemoteError, match=rf"learner.*7\.7 with messages of version 9.*{mine}"):
            other.ask()


def test_a_host_of_another_version_is_refused_before_a_node_starts_there():
    nodes = RayNodes.__new__(RayNodes)
    nodes._token = "token"
    for held in (b"7.7 9", b""):
        placement = Placement("10.0.0.2", "id", 1, (), "token", held)
        node = types.SimpleNamespace(lp_node=types.SimpleNamespace(addresses=[]), placement=None)
        with pytest.raises(ValueError, match=r"10\.0\.0\.2 has (7\.7|older)"):
            nodes.bind(node, placement)
    nodes.bind(node, placement._replace(versions=versions.own()))
