"""Nodes and hosts of different versions refuse one another, and name both versions."""

import sys
import types

import jax
import numpy as np
import pytest

from rlstack.programs.program.launch.ray.nodes import RayNodes
from rlstack.programs.program.launch.ray.runner import Placement
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


CORE = b"1.2 1 CPython-3.12,JAX-0.12,numpy-2"


@pytest.mark.parametrize(
    "theirs",
    [
        b"1.2 1 CPython-3.10,JAX-0.5,numpy-1",
        b"1.2 1 CPython-3.13,JAX-0.12,numpy-2",
        b"unknown 1 CPython-3.12,JAX-0.11,numpy-2",
    ],
)
def test_another_environment_is_named(theirs):
    text = versions.differences(theirs, "host 10.0.0.2", CORE)
    shown = theirs.decode().split()[2].replace("-", " ").replace(",", ", ")
    assert f"host 10.0.0.2 has {shown}, and this process has CPython 3.12, JAX 0.12" in text


@pytest.mark.parametrize("theirs", [CORE, b"1.2 1", b"1.2 1 CPython-3.12,JAX-unknown,numpy-2"])
def test_an_equal_or_unknown_environment_fits(theirs):
    assert versions.differences(theirs, "there", CORE) == ""
    assert versions.differences(CORE, "there", theirs) == ""


def test_this_environment_is_known_by_what_pickles_and_random_numbers_depend_on():
    words = versions.own().decode().split()
    python = f"CPython-{sys.version_info.major}.{sys.version_info.minor}"
    jax_version = jax.__version__.rsplit(".", 1)[0]
    assert words[2].split(",")[0] == python
    assert jax_version.startswith(words[2].split(",")[1].removeprefix("JAX-"))
    assert words[2].split(",")[2] == f"numpy-{np.__version__.split('.')[0]}"
    assert versions._packages(lambda _: "unknown").endswith("JAX-unknown,numpy-unknown")


def test_a_service_answers_only_callers_of_its_version():
    service = Service(Node())
    assert codec.decode(service.rpc_hello(versions.own()))[0] == 0
    refused = service.rpc_hello(b"7.7 9")
    assert refused.startswith(versions.REFUSED) and b"7.7" in refused


@pytest.mark.launchpad
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
        node = types.SimpleNamespace(name="learner", placement=None)
        with pytest.raises(ValueError, match=r"10\.0\.0\.2 has (7\.7|older)"):
            nodes.bind(node, placement)
    nodes.bind(node, placement._replace(versions=versions.own()))
