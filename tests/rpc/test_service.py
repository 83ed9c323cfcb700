"""The answers of a service, without a transport: at most once where needed, clear errors."""

import concurrent.futures
import threading
import time

import pytest

from rlstack.rpc import Remote, Service, codec, remote
from rlstack.rpc.service import ERROR, OK, RESTARTED, methods_of
from tests.rpc.nodes import Heir, Node

pytestmark = pytest.mark.timeout(30)


def call(service, method, args=(), kwargs=None, identity=(0, 0, 0, 0)):
    """Calls a service without a transport; returns the answer."""
    return codec.decode(getattr(service, method)(codec.encode((*identity, args, kwargs or {}))))


def incarnation(service):
    return codec.decode(service.rpc_hello(b""))[1]


def test_only_marked_methods_are_remote_and_heirs_inherit_the_mark():
    assert methods_of(Node)["echo"] == Remote(idempotent=True)
    assert methods_of(Node) == methods_of(Heir)
    assert sorted(dir(Service(Node()))) == sorted([*methods_of(Node), "rpc_hello"])
    assert call(Service(Heir()), "add", (3,)) == (OK, 6)
    assert methods_of({"secret": Remote()}) == {"secret": Remote()}
    assert call(Service(Node(), {"secret": Remote()}), "secret") == (OK, "not remote")
    with pytest.raises(AttributeError, match="no remote method is called 'secret'"):
        Service(Node()).secret  # noqa: B018
    for bad in (object, {"run": Remote()}, {"_hidden": Remote()}, {"rpc_hello": Remote()}):
        with pytest.raises(ValueError, match="needs public methods"):
            methods_of(bad)


def test_a_launchpad_node_sees_run_only_where_there_is_one():
    built = Service(Node(folder="here"))
    assert built.run() == "ran"
    assert call(built, "echo", (1,)) == (OK, 1)
    assert not hasattr(built, "set_courier_server")
    assert not hasattr(Service(Quiet()), "run")


class Quiet:
    @remote()
    def ping(self):
        return None


def test_a_repeated_call_is_answered_and_not_run_again():
    node = Node()
    service = Service(node)
    me = (incarnation(service), 77)
    assert [call(service, "add", (5,), identity=(*me, 1, 1)) for _ in range(3)] == [(OK, 5)] * 3
    assert call(service, "add", (5,), identity=(me[0], 78, 1, 1)) == (OK, 10)
    assert call(service, "add", (5,), identity=(*me, 2, 1)) == (OK, 15)
    assert call(service, "add", (5,), identity=(*me, 1, 1)) == (OK, 5)
    assert call(service, "add", (5,), identity=(*me, 3, 3)) == (OK, 20)
    assert len(service._memory._clients[77].calls) == 1  # settled calls are removed
    late = call(service, "add", (5,), identity=(*me, 1, 1))
    assert late[:2] == (ERROR, "ValueError")
    failed = [call(service, "fail", ("key",), identity=(*me, 4, 4)) for _ in range(2)]
    assert failed[0] == failed[1]
    assert node.runs == [5] * 4


def test_a_repeated_call_waits_for_the_one_under_way():
    node = Node()
    service = Service(node)
    identity = (incarnation(service), 77, 1, 1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, service, "wait", identity=identity) for _ in range(4)]
        while not node.runs:
            time.sleep(0.01)
        assert not concurrent.futures.wait(calls, timeout=0.1).done
        node.gate.set()
        assert [c.result(5) for c in calls] == [(OK, True)] * 4
    assert node.runs == ["wait"]


def test_a_repeated_call_waits_for_an_answer_that_comes_later():
    node = Node()
    service = Service(node)
    identity = (incarnation(service), 77, 1, 1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, service, "later", (1,), identity=identity) for _ in range(4)]
        while not node.futures:
            time.sleep(0.01)
        assert not concurrent.futures.wait(calls, timeout=0.1).done
        node.futures[0].set_result("once")
        assert [c.result(5) for c in calls] == [(OK, "once")] * 4
    assert len(node.futures) == 1
    assert call(service, "later", (1,), identity=identity) == (OK, "once")


def test_a_service_runs_nothing_that_was_meant_for_another_incarnation():
    node = Node()
    old, new = Service(node), Service(node)
    assert incarnation(old) != incarnation(new)
    answer = call(new, "add", (1,), identity=(incarnation(old), 77, 1, 1))
    assert answer == (RESTARTED, incarnation(new))
    assert node.runs == []


def test_no_number_of_clients_makes_a_call_run_twice():
    node = Node()
    service = Service(node)
    for _ in range(2):  # each client repeats its call after all others have made theirs
        for client in range(1, 3001):
            call(service, "add", (1,), identity=(0, client, 1, 1))
    assert len(node.runs) == 3000


def test_too_many_clients_are_refused_and_the_others_are_served(monkeypatch):
    monkeypatch.setattr("rlstack.rpc.service._MAX_CLIENTS", 5)
    node = Node()
    service = Service(node)
    answers = [call(service, "add", (1,), identity=(0, c, 1, 1)) for c in range(1, 7)]
    assert [answer[0] for answer in answers] == [OK] * 5 + [ERROR]
    assert "at most 5 clients" in answers[-1][2]
    assert call(service, "add", (1,), identity=(0, 1, 2, 2)) == (OK, 6)
    assert len(node.runs) == 6


class Counter:
    def __init__(self):
        self.runs, self.gate = [], threading.Event()

    @remote()
    def run_once(self, name, waits=False):
        self.runs.append(name)
        return self.gate.wait(20) if waits else name


def test_a_silent_client_keeps_its_number_but_not_its_answer(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("rlstack.rpc.service.time.monotonic", lambda: now[0])
    node = Counter()
    service = Service(node)
    memory = service._memory

    def run(name, client, number, waits=False):
        return call(service, "run_once", (name, waits), identity=(0, client, number, number))

    run("a", 1, 7)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, "b", 2, 1, waits=True)
        while len(node.runs) < 2:
            time.sleep(0.01)
        now[0] = 700.0
        run("c", 3, 1)
        assert set(memory._clients) == {2, 3}  # a call that still runs is kept
        assert run("a", 1, 7)[:2] == (ERROR, "ValueError")
        assert run("d", 1, 8) == (OK, "d")
        node.gate.set()
        assert running.result(5) == run("b", 2, 1) == (OK, True)
    now[0] = 90_000.0
    run("e", 4, 1)
    now[0] = 150_000.0
    run("f", 5, 1)
    assert (set(memory._clients), set(memory._silent)) == ({5}, {4})
    assert node.runs == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    "arguments",
    [(), (b"",), (b"x" * 50,), (1,), (b"a", b"b"), (codec.encode({}),), (codec.encode((0,) * 6),)],
)
def test_bad_requests_are_answered_with_an_error(arguments):
    service = Service(Node())
    kind, type_name, message, text = codec.decode(service.echo(*arguments))
    assert (kind, type_name) == (ERROR, "ValueError")
    assert message.startswith("ValueError: ")
    assert "Traceback" in text
    assert call(service, "echo", (1,)) == (OK, 1)
