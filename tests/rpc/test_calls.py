"""What every transport does: every call ends, errors are clear, nothing is left behind."""

import concurrent.futures
import os
import pickle
import signal
import socket
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.acting.inference import Inference
from rlstack.rpc import (
    ClosedError,
    Remote,
    RemoteError,
    RemoteObject,
    UnavailableError,
    courier,
    serve,
)
from rlstack.rpc.header import DTYPES
from rlstack.types import TimeStep
from tests.rpc.nodes import (
    Node,
    becomes,
    descriptors,
    free_port,
    in_thread,
    tasks,
    wait_until,
)
from tests.rpc.test_codec import Output, same

pytestmark = pytest.mark.timeout(30)


def test_every_dtype_and_structure_both_ways(pair):
    _, client = pair
    arrays = [np.arange(12).reshape(3, 4).astype(dtype) for dtype in DTYPES if dtype is not None]
    tree = {
        "arrays": arrays,
        "layouts": (np.zeros((0, 3)), np.float32(2), np.array(True), np.arange(6)[::2]),
        "values": [None, True, -1, 2**62, 1.5, "é", b"\x00\xff", (), {"": []}],
        "step": TimeStep(np.ones(2, np.int32), np.zeros(2), np.ones(2), {"image": np.ones((2, 3))}),
    }
    assert same(client.echo(tree), {**tree, "layouts": tuple(map(_whole, tree["layouts"]))})
    assert same(client.echo(jnp.ones(3, jnp.bfloat16)), np.ones(3, jnp.bfloat16))
    assert client.echo(1, b=2) == ((1,), {"b": 2})
    assert client.echo() == ((), {})
    large = np.arange(5_000_000, dtype=np.float32)
    assert np.array_equal(client.echo(large), large)


def _whole(x):
    return x if isinstance(x, np.generic) else np.ascontiguousarray(x).reshape(x.shape)


def test_answers_take_the_form_of_their_example(pair):
    answer = Inference(Output(np.zeros(4), np.ones(4)), (), np.zeros(4, np.int32))
    with RemoteObject(pair[1]._address, Node, name="inferencer", likes={"echo": answer}) as client:
        assert same(client.echo(answer), answer)
        assert same(pickle.loads(pickle.dumps(client)).echo(answer), answer)
        with pytest.raises(ValueError, match=r"at inferencer\.echo/agent_output: must have 2"):
            client.echo(Inference((1,), (), np.zeros(4, np.int32)))


def test_an_answer_may_come_later(pair):
    node, client = pair
    assert client.echo(0) == 0  # the first call starts threads
    calls = [in_thread(client.later, number) for number in range(40)]
    wait_until(lambda: len(node.futures) == 40)
    assert client.echo(1) == 1
    assert not any(call.done() for call in calls)
    for number, future in zip(node.runs, node.futures, strict=True):
        if number % 2:
            future.set_result(np.full(3, number))
        else:
            future.set_exception(KeyError(f"of {number}"))
    for number, call in enumerate(calls):
        if number % 2:
            assert same(call.result(10), np.full(3, number))
        else:
            with pytest.raises(RemoteError, match=f"KeyError: 'of {number}'"):
                call.result(10)


@pytest.mark.parametrize("name", ["direct", "zmq"])
def test_calls_whose_answers_come_later_hold_no_threads(name, request):
    request.getfixturevalue("zmq_keys")
    node = Node()
    with (
        serve(node, transport=name) as server,
        RemoteObject(server.address, Node, name="n") as client,
    ):
        calls = [in_thread(client.later, number) for number in range(60)]
        wait_until(lambda: len(node.futures) == 60)
        serving = [t for t in threading.enumerate() if t.name == f"{name} server"]
        assert len(serving) < 30  # each call has its own thread here, but not there
        for future in node.futures:
            future.set_result(None)
        for call in calls:
            assert call.result(10) is None


def test_a_server_closes_when_the_later_answers_are_sent(transport):
    node = Node()
    server = serve(node, transport=transport)
    with RemoteObject(server.address, Node, name="n") as client:
        call = in_thread(client.later, 1)
        wait_until(lambda: node.futures)
        closing = in_thread(server.close)
        time.sleep(0.2)
        assert not closing.done()
        node.futures[0].set_result("answered")
        assert call.result(10) == "answered"
        closing.result(10)


def test_what_is_raised_there_is_told_here(pair):
    _, client = pair
    with pytest.raises(
        RemoteError, match=r"learner\.fail: KeyError: (.|\n)*On the node:"
    ) as caught:
        client.fail("key")
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.node, error.method, error.type_name) == ("learner", "fail", "KeyError")
    assert "in fail" in error.remote_traceback
    assert "the café's key" in str(error)
    with pytest.raises(RemoteError, match="SystemExit"):
        client.fail("exit")
    with pytest.raises(
        RemoteError, match=r"ValueError: codec.encode: at /1/x/0: objects of builtins.object"
    ):
        client.unsendable()
    with pytest.raises(RemoteError, match=r"TypeError: .*positional"):
        client.add()
    with pytest.raises(ValueError, match=r"codec.encode: at /4/0: objects of builtins.object"):
        client.echo(object())
    with pytest.raises(AttributeError, match="no remote method is called 'secret'"):
        client.secret()
    assert client.echo(1) == 1


def test_a_method_the_node_does_not_have(pair):
    client = RemoteObject(pair[1]._address, {"nothing": Remote()}, name="x")
    with pytest.raises(RemoteError, match=r"x\.nothing: NOT_FOUND"):
        client.nothing()


def test_a_deadline_ends_the_wait_and_says_how_long(pair):
    node, client = pair
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=r"learner\.wait: .*waited 0\.[34] of 0\.3 s"):
        client.call("wait", timeout=0.3)
    assert 0.3 <= time.monotonic() - start < 2
    assert issubclass(UnavailableError, TimeoutError)
    node.gate.set()
    assert client.echo(1) == 1
    with pytest.raises(ValueError, match="timeout must be positive"):
        RemoteObject("x:1", Node, name="x", timeout=0)


def test_a_caller_that_is_to_stop_waits_for_no_missing_node(transport):
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    start = time.monotonic()
    with (
        RemoteObject(f"localhost:{free_port()}", Node, name="gone", stop=stop) as client,
        pytest.raises(UnavailableError, match="could not be reached"),
    ):
        client.echo(1)
    assert 0.2 <= time.monotonic() - start < 5
    timer.join()


def test_nobody_there(transport):
    start = time.monotonic()
    with RemoteObject(f"localhost:{free_port()}", Node, name="actor_3", timeout=0.5) as client:
        for method in (client.echo, client.add):
            with pytest.raises(UnavailableError, match=r"actor_3.*could not be reached.*of 0.5 s"):
                method(1)
    assert time.monotonic() - start < 3


def test_many_calls_at_once(pair):
    node, client = pair
    futures = [in_thread(client.add, 1) for _ in range(100)]
    echoes = [in_thread(client.echo, np.full(100, i)) for i in range(100)]
    assert sorted(f.result(10) for f in futures) == sorted(set(range(1, 101)))
    assert all(same(f.result(10), np.full(100, i)) for i, f in enumerate(echoes))
    assert node.runs == [1] * 100
    assert isinstance(in_thread(client.fail, "key").exception(5), RemoteError)


def test_close_ends_all_waiting(pair):
    node, client = pair
    errors = []

    def wait():
        try:
            client.wait()
        except ClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    futures = [in_thread(client.wait) for _ in range(13)]
    while len(node.runs) < 16:  # as many as each transport runs at once
        time.sleep(0.01)
    start = time.monotonic()
    client.close()
    for thread in threads:
        thread.join(5)
    concurrent.futures.wait(futures, timeout=5)
    assert time.monotonic() - start < 1
    assert len(errors) == 3
    assert all(isinstance(f.exception(0), ClosedError) for f in futures)
    with pytest.raises(ClosedError, match="learner"):
        client.echo(1)


def test_close_ends_the_search_for_a_node_that_is_away(transport):
    client = RemoteObject(f"localhost:{free_port()}", Node, name="x", timeout=20)
    future = in_thread(client.echo, 1)
    time.sleep(0.3)
    client.close()
    assert isinstance(future.exception(2), ClosedError)


def test_signals_are_handled_while_a_call_waits(pair):
    class StopError(Exception):
        pass

    def handler(*_):
        raise StopError

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        start = time.monotonic()
        with pytest.raises(StopError):
            pair[1].wait()
        assert time.monotonic() - start < 2
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert pair[1].echo(1) == 1


def test_nothing_is_left(transport):
    """No thread, descriptor or port is left, not even of clients dropped without close."""
    # Libraries' threads may stay after the first round, or when they are busy; ours would in each.
    for earlier in range(5):
        before, count = set(threading.enumerate()), (tasks(), descriptors())
        with serve(Node()) as server:
            port = int(server.address.rsplit(":", 1)[1])
            for _ in range(10):
                client = RemoteObject(server.address, Node, name="x")
                assert client.echo(1) == 1
                assert in_thread(client.echo, 2).result(5) == 2
                client.close()
                assert RemoteObject(server.address, Node, name="dropped").echo(1) == 1
            del client
        if transport == "courier":
            courier._free_retired()
        wait_until(lambda before=before: set(threading.enumerate()) <= before)
        grew = not becomes(lambda count=count: tasks() <= count[0], 3.0)
        grew |= transport != "courier" and descriptors() > count[1]
        if earlier and not grew:
            break
    assert not grew
    if transport == "courier":
        assert courier._retired == []
    if transport != "direct":
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
