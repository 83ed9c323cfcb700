"""Nodes for the tests of calls."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlstack.rpc import RemoteObject, serve
from tests.rpc.nodes import Node

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pair():
    pytest.importorskip("courier")
    node = Node()
    server = serve(node)
    with server, RemoteObject(server.address, Node, name="learner") as client:
        yield node, client
        node.gate.set()


@pytest.fixture
def processes():
    """Starts servers in child processes, and ends them."""
    pytest.importorskip("courier")
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
