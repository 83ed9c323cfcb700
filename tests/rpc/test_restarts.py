"""Calls to nodes that are killed, restarted, late or moved."""

import pickle
import socket
import time

import pytest

from rlstack.rpc import RemoteObject, UnavailableError, serve
from tests.rpc.nodes import Node, free_port, in_thread, wait_until


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["slow", "slow_once"])
def test_a_node_that_is_killed_and_restarted_mid_call(processes, tmp_path, method):
    port = free_port()
    first = processes(port, tmp_path)
    with RemoteObject(f"localhost:{port}", Node, name="replay", timeout=25) as client:
        client.echo(1)
        future = in_thread(getattr(client, method), 0.5)
        log = tmp_path / "log"
        wait_until(lambda: log.exists() and log.read_text())  # it writes after it opens
        first.kill()
        first.wait(5)
        second = processes(port, tmp_path, wait=False)
        if method == "slow":  # idempotent calls run again
            assert future.result(25) == second.pid
            assert log.read_text() == "slow\nslow\n"
        else:
            error = future.exception(25)
            assert isinstance(error, UnavailableError)
            assert "replay.slow_once" in str(error)
            assert "was restarted and may have run it" in str(error)
            assert log.read_text() == "once\n"
            assert client.slow_once(0) == second.pid  # the next call reaches the new process


@pytest.mark.timeout(60)
def test_a_node_restarted_between_calls_and_one_that_comes_late(processes, tmp_path):
    port = free_port()
    with RemoteObject(f"localhost:{port}", Node, name="replay", timeout=25) as client:
        early = in_thread(client.add, 2)
        first = processes(port, tmp_path)
        assert early.result(25) == 2
        first.kill()
        first.wait(5)
        processes(port, tmp_path)
        assert client.add(3) == 3  # run once, by the new process; the old one has ended
        assert client.add(3) == 6


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
def test_a_patient_caller_gets_the_answer_of_the_call_that_took_too_long(transport):
    node, asked = Node(), []
    with serve(node) as server, RemoteObject(server.address, Node, name="n", timeout=0.3) as client:

        def patient(answers):
            asked.append(answers)
            if len(asked) == 3:
                node.gate.set()
            return True

        assert client.call("wait", patient=patient) is True
        assert asked == [True] * 3
        assert node.runs == ["wait"]
        node.gate.clear()
        with pytest.raises(UnavailableError, match="it may still run there"):
            client.call("wait", patient=lambda answers: False)
        node.gate.set()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
def test_a_patient_caller_waits_for_a_node_that_starts_but_repeats_nothing_after_a_restart(
    processes, tmp_path
):
    port, answered = free_port(), []

    def patient(answers):
        answered.append(answers)
        return True

    with RemoteObject(f"localhost:{port}", Node, name="replay", timeout=0.5) as client:
        early = in_thread(lambda: client.call("add", (2,), patient=patient))
        wait_until(lambda: len(answered) >= 2)
        assert not any(answered)
        first = processes(port, tmp_path)
        assert early.result(25) == 2
        lost = in_thread(lambda: client.call("slow_once", (60.0,), patient=patient))
        log = tmp_path / "log"
        wait_until(lambda: log.exists() and log.read_text())  # it writes after it opens
        first.kill()
        first.wait(5)
        processes(port, tmp_path)
        error = lost.exception(25)
        assert isinstance(error, UnavailableError)
        assert "was restarted and may have run it" in str(error)
        assert log.read_text() == "once\n"


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(30)
def test_a_node_that_moved_is_found_at_its_new_address(sockets):
    """As after a restart on another host; the old address may refuse connections, or not answer."""
    with socket.socket() as deaf, serve(Node()) as new:
        deaf.bind(("localhost", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:  # fills the queue: further connections wait for ever
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        first, asked = serve(Node()), []

        def find():
            asked.append(True)
            return new.address if len(asked) > 1 else ""

        for old in (first.address, f"localhost:{deaf.getsockname()[1]}"):
            asked.clear()
            client = RemoteObject(old, Node, name="node", timeout=5.0, find=find)
            if old == first.address:
                assert client.echo(1) == 1
                assert asked == []
                first.close()
            deadline = time.monotonic() + 20.0
            while True:
                try:
                    assert client.call("echo", (2,), timeout=1.0) == 2
                    break
                except UnavailableError:
                    assert time.monotonic() < deadline
            assert len(asked) > 1
            assert pickle.loads(pickle.dumps(RemoteObject(old, Node, name="node"))).echo
            client.close()
        for filler in fillers:
            filler.close()
