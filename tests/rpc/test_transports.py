"""Which transport a process uses, and what importing rlstack loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlstack.rpc import RemoteObject, serve, transports
from tests.rpc.nodes import Node

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(60)


def test_rpc_is_cheap_to_import():
    code = (
        "import sys, rlstack.rpc\nprint({'courier', 'launchpad', 'tree', 'zmq'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=25
    )
    assert done.stdout == "set()\n", done.stderr


def test_an_address_names_its_transport():
    with transports.chosen("zmq"):
        direct, socket = serve(Node(), transport="direct"), serve(Node())
        with direct, socket:
            assert socket.address.startswith("zmq://localhost:")
            assert direct.address.startswith("direct://localhost:")
            for server in (direct, socket):
                assert RemoteObject(server.address, Node, name="n").echo(3) == 3
            bare = socket.address.removeprefix("zmq://")
            assert RemoteObject(bare, Node, name="n").echo(4) == 4


def test_one_transport_at_a_time_and_the_default_afterwards():
    before = dict(os.environ)
    with transports.chosen("direct"):
        with transports.chosen("zmq"):
            assert transports.current() == "zmq"
        assert transports.current() == "direct"
    assert dict(os.environ) == before
    assert transports.current() == ("courier" if transports.is_installed("courier") else "zmq")


def test_an_unknown_transport_is_refused():
    for use in (
        lambda: transports.chosen("carrier-pigeon").__enter__(),
        lambda: serve(Node(), transport="tcp"),
        lambda: RemoteObject("tcp://localhost:1", Node, name="n").echo(1),
    ):
        with pytest.raises(ValueError, match="must be one of"):
            use()


def test_without_zmq_the_way_out_is_said(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rlstack.rpc.zmq.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModuleNotFoundError, match="needs pyzmq, which is not installed"):
        serve(Node(), transport="zmq")
