"""Nodes for the tests of calls, over each transport."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlstack.rpc import RemoteObject, serve, transports
from tests.rpc.nodes import Node

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=transports.TRANSPORTS)
def transport(request):
    """The transport of this process; each test of it runs with every one that is installed."""
    yield from _chosen(request.param)


@pytest.fixture(params=[name for name in transports.TRANSPORTS if name != "direct"])
def sockets(request):
    """As `transport`, without the one that has no sockets."""
    yield from _chosen(request.param)


@pytest.fixture
def zmq_keys():
    """The transport zmq, with keys."""
    yield from _chosen("zmq")


@pytest.fixture
def courier():
    """The transport Courier."""
    yield from _chosen("courier")


def _chosen(name):
    if not transports.is_installed(name):
        pytest.skip(f"{name} is not installed")
    with transports.chosen(name):
        yield name


@pytest.fixture
def pair(transport):
    """A node and a client of it."""
    yield from pair_over(transport)


def pair_over(transport):
    node = Node()
    server = serve(node, transport=transport)
    with server, RemoteObject(server.address, Node, name="learner") as client:
        yield node, client
        node.gate.set()


@pytest.fixture
def processes(sockets):
    """Starts servers in child processes, and ends them."""
    running = []

    def start(port, folder, wait=True):
        code = (
            f"from tests.rpc.nodes import serve_for_ever; serve_for_ever({port}, {str(folder)!r})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        running.append(process)
        if wait:
            assert process.stdout.readline() == b"up\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.wait(5)
        process.stdin.close()
        process.stdout.close()
