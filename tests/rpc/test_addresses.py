"""Addresses of IPv4 and IPv6 as text, ports that are held, and calls over IPv6."""

import socket
import threading
from pathlib import Path

import pytest

from rlstack.rpc import RemoteObject, addresses, serve, transports
from rlstack.rpc.socket_filter import address_of, address_towards, restrict_listeners
from tests.rpc.nodes import Node

pytestmark = pytest.mark.timeout(60)


def _ipv6(scope):
    """An address of this machine with this scope, as Linux numbers them; "" if it has none."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        number, _, _, found, _, _ = line.split()
        if found == scope:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
    return ""


needs_loopback = pytest.mark.skipif(_ipv6("10") != "::1", reason="this machine has no ::1")
needs_global = pytest.mark.skipif(not _ipv6("00"), reason="this machine has no IPv6 address")


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("10.0.0.1", "80", "10.0.0.1:80"), ("::1", "80", "[::1]:80"), ("node-1", "80", "node-1:80")],
)
def test_ipv6_has_brackets_where_a_port_follows(host, port, text):
    assert addresses.join(host, port) == text
    assert addresses.split(text) == (host, port)


def test_an_address_without_a_port_is_a_host():
    assert addresses.split("node-1") == ("node-1", "")
    assert addresses.split("[fd00::2]") == ("fd00::2", "")


def test_kinds_of_addresses():
    assert addresses.family("10.0.0.1") == socket.AF_INET
    assert addresses.family("fd00::2") == socket.AF_INET6
    loopback = [addresses.is_loopback(host) for host in ("127.0.0.2", "::1", "10.0.0.1", "fd00::2")]
    assert loopback == [True, True, False, False]
    assert [addresses.is_all(host) for host in ("0.0.0.0", "::", "::1")] == [True, True, False]
    assert addresses.resolved("localhost") == addresses.resolved("") == "127.0.0.1"
    assert addresses.resolved("fd00::2") == "fd00::2"
    assert address_of("fd00::0:2") == "fd00::2"


@needs_loopback
def test_the_way_to_an_ipv6_host_begins_at_an_ipv6_address():
    assert address_towards("::1") == "::1"


def _listener(port):
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen()
    return found


def test_ports_of_a_range_are_held_one_after_another_until_a_server_takes_them():
    with addresses.reserve_port() as first:
        ports = range(first, first + 3)  # `first` is taken, by a socket that shares addresses
        with addresses.reserve_port(ports) as one, addresses.reserve_port(ports) as two:
            assert first < one < two <= first + 2
            with _listener(one):
                if two == first + 2:
                    with (
                        pytest.raises(OSError, match=r"all 3 are taken.*--program\.ports"),
                        addresses.reserve_port(ports),
                    ):
                        pass


@pytest.mark.parametrize("address", [pytest.param("::1", marks=needs_loopback), "::"])
def test_calls_go_over_ipv6(address):
    if address == "::" and not _ipv6("10"):
        pytest.skip("this machine has no IPv6")
    with transports.chosen("zmq"), serve(Node(), bind_address=address) as server:
        port = server.address.rpartition(":")[2]
        for place in (f"[::1]:{port}", f"127.0.0.1:{port}", f"localhost:{port}"):
            client = RemoteObject(f"zmq://{place}", Node, name="n")
            assert client.echo(3) == 3
            assert client.host == addresses.split(place)[0]


@needs_loopback
def test_what_a_refused_address_of_ipv6_is():
    with transports.chosen("zmq"), pytest.raises(OSError, match=r"listen on 2001:db8::1, port any"):
        serve(Node(), bind_address="2001:db8::1")


def _answers(host, port):
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


@needs_global
@needs_loopback
def test_a_filter_lets_one_ipv6_address_through():
    """A server that listens everywhere is reached at loopback, and at the address that is named."""
    own = _ipv6("00")
    for allowed, reached in ((own, True), ("2001:db8::1", False), ("127.0.0.1", False)):
        with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
            port = server.getsockname()[1]
            threading.Thread(target=_accept, args=(server,), daemon=True).start()
            assert _answers(own, port)
            restrict_listeners(port, allowed)
            assert _answers("::1", port) and _answers("127.0.0.1", port)
            assert _answers(own, port) == reached


def _accept(server):
    while True:
        try:
            server.accept()
        except OSError:
            return


def test_a_program_that_joins_has_the_keys_of_the_first():
    with transports.chosen("zmq"):
        secret = transports.secret()
        with serve(Node()) as server, transports.chosen("zmq", secret=secret):
            assert transports.secret() == secret
            assert RemoteObject(server.address, Node, name="n").echo(5) == 5
    with transports.chosen("direct"):
        assert transports.secret() == b""
