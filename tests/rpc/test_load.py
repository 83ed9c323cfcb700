"""Many calls, many clients, large messages, and peers that are killed, over each transport."""

import concurrent.futures
import gc
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlstack.rpc import RemoteObject, UnavailableError, serve
from tests.rpc.nodes import Node, descriptors, free_port, in_thread, tasks, wait_until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(60)
LATER = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.parametrize("calls", [300, pytest.param(10_000, marks=LATER)])
def test_many_calls_leave_nothing(pair, calls):
    node, client = pair
    rows = np.ones((8, 128), np.float32)

    def some(count):
        for _ in range(count):
            assert client.echo(rows).shape == (8, 128)
            client.add(1)
            node.runs.clear()
        gc.collect()
        return psutil.Process().memory_info().rss

    before = some(max(100, calls // 10))
    threads, opened = tasks(), descriptors()
    after = some(calls)
    assert after - before < 20e6, "the memory of 10,000 calls of 4 kB would be 40 MB"
    assert tasks() <= threads + 2
    assert descriptors() <= opened + 2


@pytest.mark.parametrize("clients", [8, pytest.param(64, marks=LATER)])
def test_many_clients_at_once(pair, clients):
    node, client = pair
    address = client._address

    def use(number):
        with RemoteObject(address, Node, name=f"client {number}", timeout=30) as own:
            for i in range(10):
                assert own.echo(np.full(50, i)).tolist() == [i] * 50
                own.add(1)

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(use, number) for number in range(clients)]:
            done.result(60)
    assert node.runs == [1] * (10 * clients)


@pytest.mark.parametrize("size", [3_000_000, pytest.param(100_000_000, marks=LATER)])
def test_large_messages_both_ways(pair, size):
    sent = np.arange(size // 4, dtype=np.float32)
    with RemoteObject(pair[1]._address, Node, name="learner", timeout=60) as client:
        got = client.echo({"rows": sent, "name": "x"})
    assert np.array_equal(got["rows"], sent)
    assert got["rows"].flags.aligned and not got["rows"].flags.writeable


def test_a_peer_that_is_killed_is_noticed_at_once(processes, tmp_path):
    port = free_port()
    server = processes(port, tmp_path)
    with RemoteObject(f"localhost:{port}", Node, name="n", timeout=30, retries=0) as client:
        client.echo(1)
        waiting = in_thread(client.slow_once, 60.0)
        wait_until((tmp_path / "log").exists)
        start = time.monotonic()
        server.kill()
        error = waiting.exception(20)
        assert isinstance(error, UnavailableError) and "the connection broke" in str(error)
        assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_server_outlives_a_client_that_is_killed(sockets):
    node = Node()
    with serve(node) as server, RemoteObject(server.address, Node, name="n") as client:
        code = (
            "from rlstack.rpc import RemoteObject; from tests.rpc.nodes import Node\n"
            f"RemoteObject({server.address!r}, Node, name='child', timeout=50).wait(50.0)"
        )
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        try:
            wait_until(lambda: node.runs == ["wait"], 30.0)
        finally:
            child.kill()
            child.wait(5)
        assert client.echo(1) == 1
        node.gate.set()  # the answer finds nobody
        node.runs.clear()
        assert client.add(1) == 1


def test_garbage_on_the_socket_does_no_harm(sockets):
    with serve(Node()) as server, RemoteObject(server.address, Node, name="n") as client:
        port = int(server.address.rsplit(":", 1)[1])
        for garbage in (
            b"",
            b"\x00" * 5000,
            b"\xff" * 5000,
            os.urandom(100_000),
            b"GET / HTTP/1.1",
        ):
            with socket.create_connection(("localhost", port), timeout=5) as stranger:
                stranger.settimeout(0.2)
                try:
                    stranger.sendall(garbage)
                    assert b"RLC" not in stranger.recv(1000)
                except OSError:
                    pass
        assert client.echo(1) == 1
