"""What is special to ZeroMQ: frames of a peer that has the keys, forks, and the process's end."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlstack.rpc import RemoteObject, codec, remote, serve
from rlstack.rpc.service import ERROR
from tests.rpc.nodes import Node, in_thread, wait_until

zmq = pytest.importorskip("zmq")

from rlstack.rpc.zmq import keys, options  # noqa: E402  (after zmq is known to be there)

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(60)


def test_malformed_frames_of_an_admitted_peer_do_no_harm(zmq_keys):
    node = Node()
    with serve(node) as server, zmq.Context() as context:
        peer, own = context.socket(zmq.DEALER), keys.current()
        with peer:
            options.set_options(peer)
            peer.curve_serverkey = own.server_public
            peer.curve_publickey, peer.curve_secretkey = own.client_public, own.client_secret
            peer.connect(server.address.replace("zmq", "tcp"))
            statuses = []
            for frames in ([b""], [b"echo"], [b"echo", b"", b""], [b"secret", b""], [b"run", b""]):
                peer.send_multipart(frames)
                assert peer.poll(5000)
                statuses.append(peer.recv_multipart()[0])
            assert statuses == [b"INTERNAL"] * 3 + [b"NOT_FOUND"] * 2
            for bad in (b"", b"RLC\x01" + b"\xff" * 30, os.urandom(100_000)):
                peer.send_multipart([b"add", bad])
                assert peer.poll(5000)
                status, answer = peer.recv_multipart()
                assert status == b"OK" and codec.decode(answer)[0] == ERROR
        assert RemoteObject(server.address, Node, name="n").add(2) == 2
    assert node.runs == [2]


def test_a_connection_is_used_again_and_a_late_answer_is_not_taken_for_another(zmq_keys):
    node = Node()
    with serve(node) as server, RemoteObject(server.address, Node, name="n") as client:
        for _ in range(20):
            client.echo(1)
        assert len(client._channel._idle) == 1
        with pytest.raises(TimeoutError):
            client.call("wait", timeout=0.1)
        node.gate.set()
        assert [client.echo(i) for i in range(10)] == list(range(10))


def test_a_server_that_was_restarted_between_calls_is_reached_by_a_new_connection(zmq_keys):
    first = serve(Node())
    port = int(first.address.rsplit(":", 1)[1])
    with RemoteObject(first.address, Node, name="n", retries=0) as client:
        assert client.echo(1) == 1
        first.close()
        with serve(Node(), port=port):
            wait_until(lambda: not client._channel._idle[0].is_alive())
            assert client.echo(2) == 2


def test_more_calls_than_threads_wait_at_once(zmq_keys):
    node = Node()
    with serve(node) as server, RemoteObject(server.address, Node, name="n", timeout=30) as client:
        waiting = [in_thread(client.wait) for _ in range(40)]
        wait_until(lambda: len(node.runs) == 40, 20.0)
        assert client.echo(1) == 1  # none of them delays another call
        node.gate.set()
        assert all(call.result(10) for call in waiting)


class Prompt:
    """A node whose methods are marked as prompt, although `hold` blocks."""

    def __init__(self):
        self.gate = threading.Event()

    @remote(prompt=True)
    def echo(self, value):
        return value

    @remote(prompt=True)
    def hold(self):
        return self.gate.wait(20.0)


def test_few_threads_answer_the_prompt_calls_of_many_clients(zmq_keys):
    with serve(Prompt()) as server, contextlib.ExitStack() as stack:
        address = server.address
        clients = [stack.enter_context(RemoteObject(address, Prompt, name="n")) for _ in range(8)]

        def call(client):
            return [client.echo(number) for number in range(100)]

        calls = [in_thread(call, client) for client in clients]
        assert all(call.result(30) == list(range(100)) for call in calls)
        wait_until(lambda: server._threads == 2)  # one that waits, and one that stands by


def test_another_thread_answers_while_a_prompt_method_takes_long_after_all(zmq_keys):
    node = Prompt()
    with serve(node) as server, RemoteObject(server.address, Prompt, name="n") as client:
        client.echo(0)
        for _ in range(3):
            held = in_thread(client.hold)
            assert client.echo(1) == 1
            assert not held.done()
            node.gate.set()
            assert held.result(10)
            node.gate.clear()
        wait_until(lambda: server._threads == 2)


def test_answers_sent_just_before_the_server_closes_arrive(zmq_keys):
    for _ in range(30):
        node = Node()
        with contextlib.ExitStack() as stack:
            server = serve(node)
            clients = [
                stack.enter_context(RemoteObject(server.address, Node, name="n")) for _ in range(6)
            ]
            calls = [in_thread(client.later, 1) for client in clients]
            wait_until(lambda node=node: len(node.futures) == 6)
            closing = in_thread(server.close)
            for future in node.futures:
                future.set_result("answered")
            assert [call.result(10) for call in calls] == ["answered"] * 6
            closing.result(10)


FORKS = """
import os, sys, threading
from rlstack.rpc import RemoteObject, serve, transports
from tests.rpc.nodes import Node
with transports.chosen("zmq"):
    server, node = serve(Node()), None
    client = RemoteObject(server.address, Node, name="n")
    client.echo(1)
    child = os.fork()
    if child == 0:
        answer = client.echo(2) + RemoteObject(server.address, Node, name="n").echo(3)
        server.close()  # the parent's
        sys.stdout.flush()
        os._exit(answer)
    assert os.waitpid(child, 0)[1] >> 8 == 5
    assert client.echo(4) == 4
    if sys.argv[1] == "closed":
        client.close()
        server.close()
    print("done")
"""


@pytest.mark.parametrize("how", ["left open", pytest.param("closed", marks=pytest.mark.slow)])
def test_forked_processes_call_by_themselves_and_the_interpreter_ends(how):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS, how],
        cwd=ROOT, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
