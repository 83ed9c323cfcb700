"""What is special to Courier: its own callers, Launchpad's server, and where it is missing."""

import contextlib
import sys

import numpy as np
import pytest

from rlstack.rpc import RemoteError, RemoteObject, Service, codec, serve
from rlstack.rpc.service import ERROR, methods_of
from tests.rpc.conftest import pair_over
from tests.rpc.nodes import Node
from tests.rpc.test_codec import same

pytestmark = [pytest.mark.timeout(30), pytest.mark.launchpad]


def test_servers_of_others():
    courier = pytest.importorskip("courier")
    server = courier.Server()
    server.Bind("rpc_hello", lambda data: 3)
    server.Start()
    client = RemoteObject(f"courier://{server.address}", Node, name="x")
    with pytest.raises(RemoteError, match=r"x\.echo: the answer is not from an rlstack service"):
        client.echo(1)
    server.Stop()
    server.Join()


def test_bad_calls_of_others_do_no_harm():
    courier = pytest.importorskip("courier")
    with contextlib.closing(pair_over("courier")) as pairs:
        _, client = next(pairs)
        stranger = courier.Client(client._address.removeprefix("courier://"), call_timeout=5)
        for bad in ((), (1,), ("text",), (b"RLC\x01" + b"\xff" * 30,), (b"a", {"b": 1})):
            assert codec.decode(stranger.add(*bad))[0] == ERROR
        assert client.add(2) == 2
        assert "secret" not in courier.list_methods(stranger)


def test_launchpads_server_exposes_the_remote_methods_alone():
    courier = pytest.importorskip("courier")
    courier_utils = pytest.importorskip("launchpad.nodes.courier.courier_utils")
    server = courier_utils.make_courier_server(Service(Node()))
    server.Start()
    try:
        with RemoteObject(courier.Client(server.address), Node, name="node") as client:
            assert same(client.echo(np.arange(3)), np.arange(3))
            assert client.add(3) == 3
        names = courier.list_methods(courier.Client(server.address, call_timeout=5))
        assert set(names) == {*methods_of(Node), "rpc_hello"}
    finally:
        server.Stop()
        server.Join()


def test_without_courier_the_way_out_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "courier", None)
    with pytest.raises(ModuleNotFoundError, match="Use the single_process topology"):
        serve(Node(), transport="courier")
