"""Servers that listen on all addresses answer at only one."""

import contextlib
import socket
import threading
import time

import psutil
import pytest

from rlstack.rpc.addresses import ALL_ADDRESSES, LOOPBACK
from rlstack.rpc.socket_filter import address_of, restrict_listeners
from tests.programs.running import ppo, run

pytestmark = pytest.mark.timeout(90, method="thread")


def own_address():
    """An IPv4 address of this host that is not a loopback address."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                return found.address
    pytest.skip("this host has no address but the loopback's")


def six():
    """A global or link-local IPv6 address, without its zone."""
    for addresses in psutil.net_if_addrs().values():
        for found in addresses:
            if found.family == socket.AF_INET6 and found.address[:2] == "fd":
                return found.address
    return None


@pytest.fixture
def server():
    """Listens on all addresses, and echoes the data that it receives."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(connection.recv(100_000))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def answers(host, port):
    try:
        with socket.create_connection((host, port), timeout=0.5) as client:
            client.sendall(b"word" * 1000)
            return client.recv(4) == b"word"
    except OSError:
        return False


def test_loopback_alone(server):
    own, hosts = own_address(), ("127.0.0.1", "127.0.0.2", "::1")
    assert all(answers(host, server) for host in (*hosts, own))
    restrict_listeners(server, LOOPBACK)
    assert [answers(host, server) for host in hosts] == [True] * 3
    assert not answers(own, server)
    if six():
        assert not answers(six(), server)


def test_one_address_and_loopback(server):
    own = own_address()
    restrict_listeners(server, own)
    assert answers(own, server)
    assert answers("127.0.0.1", server)
    restrict_listeners(server, "192.0.2.77")  # not an address of this host
    assert not answers(own, server)


@pytest.fixture
def slow_server():
    """A server that begins to accept connections when it is told to, and keeps them."""
    go, kept = threading.Event(), []
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:

        def serve():
            go.wait(20)
            while True:
                try:
                    kept.append(listener.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], go
        go.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def is_open(client):
    client.settimeout(0.3)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("accepted", ["before", "meanwhile"])
def test_connections_from_before_the_filter_are_shut_down(slow_server, accepted):
    port, go = slow_server
    hosts = [own_address(), "127.0.0.1", "::1", *([six()] if six() else [])]
    clients = [socket.create_connection((host, port), 1) for host in hosts]
    with contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        timer = threading.Timer(0.0 if accepted == "before" else 0.3, go.set)
        timer.start()
        if accepted == "before":
            timer.join()
            time.sleep(0.2)
        restrict_listeners(port, LOOPBACK)
        timer.join()
        assert [is_open(client) for client in clients] == [False, True, True, False][: len(hosts)]


def test_a_server_that_leaves_earlier_connections_waiting_is_refused(slow_server, monkeypatch):
    monkeypatch.setattr("rlstack.rpc.socket_filter._ACCEPT_SECONDS", 0.2)
    port, _ = slow_server
    with (
        socket.create_connection((own_address(), port), 1),
        pytest.raises(OSError, match=r"must accept its connections within 0.2 s"),
    ):
        restrict_listeners(port, LOOPBACK)
    with socket.create_connection(("127.0.0.1", port), 1):
        pass


def test_everywhere_is_left_as_it_is(server):
    restrict_listeners(server, ALL_ADDRESSES)
    assert answers(own_address(), server)


def test_a_port_without_a_listener_is_refused():
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        with pytest.raises(OSError, match="must listen on port"):
            restrict_listeners(silent.getsockname()[1], LOOPBACK)


def test_interfaces_have_addresses():
    assert address_of("lo") == "127.0.0.1"
    assert address_of("192.0.2.7") == "192.0.2.7"
    with pytest.raises(ValueError, match=r"an interface that has one \(.*lo.*\); got 'nosuch0'"):
        address_of("nosuch0")


@pytest.mark.launchpad
@pytest.mark.parametrize("interface", ["", pytest.param(ALL_ADDRESSES, marks=pytest.mark.slow)])
def test_all_servers_of_a_program_keep_to_loopback_unless_told_otherwise(
    tmp_path, monkeypatch, interface
):
    pytest.importorskip("launchpad")
    reached = {}  # by port: whether it answers at an own address, and at loopback

    def restrict_and_try(port, address):
        restrict_listeners(port, address)
        reached[port] = tuple(can_connect(host, port) for host in (own_address(), LOOPBACK))

    monkeypatch.setattr("rlstack.rpc.courier.restrict_listeners", restrict_and_try)
    monkeypatch.setattr("rlstack.replay.reverb.server.restrict_listeners", restrict_and_try)
    listened, over = set(), threading.Event()

    def look():
        while not over.wait(0.05):
            listened.update(listening_ports() - before)

    before, looking = listening_ports(), threading.Thread(target=look)
    looking.start()
    try:
        program = {"interface": interface, "num_actors": 1, "transport": "courier"}
        run(ppo("distributed", program=program), tmp_path / "run")
    finally:
        over.set()
        looking.join()
    assert len(reached) >= 4  # coordinator, learner, service, replay
    assert set(reached.values()) == {(bool(interface), True)}
    assert listened <= reached.keys()  # every server was restricted


def listening_ports():
    connections = psutil.Process().net_connections("tcp")
    return {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}


def can_connect(host, port):
    try:
        socket.create_connection((host, port), timeout=0.3).close()
        return True
    except OSError:
        return False
