"""Hosts get params from one another: the learner's link carries each version a few times only."""

import collections
import contextlib
import threading
import time

import numpy as np
import pytest

from rlstack.acting.params import ParamsPublisher
from rlstack.programs.program.learner import LearnerNode
from rlstack.programs.program.params import FromHosts, HostParams, ParamsTree
from rlstack.programs.session import timing
from rlstack.rpc import RemoteObject, codec, remote, serve, transports
from tests.programs.program.test_host_params import sent_by

SIZE, HOSTS, VERSIONS = 400_000, 7, 4


class Learner:
    """What `LearnerNode.next_params` uses of its node, with params that are the version."""

    next_params = LearnerNode.next_params

    def __init__(self):
        self.version, self._learner, self._updated = 0, self, threading.Condition()
        self._publisher, self._hosts = ParamsPublisher(self, codec.encode), ParamsTree(2 * SIZE)

    def get_params(self, newer_than=-1):
        params = np.full(SIZE // 4, self.version, np.int32)
        return (self.version, params) if self.version > newer_than else None


class Host:
    """A host with one service."""

    def __init__(self, name, learner, folder):
        self.client = RemoteObject(learner, Learner, name="learner")
        self.address, self.held, self.gives = "", -1, lambda held: held
        self.tree = FromHosts(self.client, 0.0, name, lambda: self.address)
        self.params = HostParams(name, self.tree.get, str(folder))
        self.server = serve(self, bind_address="127.0.0.1")
        self.address = self.server.address

    @remote(idempotent=True)
    def share_params(self, newer_than, seconds):
        return self.gives(self.params.wait(newer_than, seconds))

    def pull(self):
        found = self.params.get(self.held)
        if found is not None:
            version, params = found
            assert version > self.held  # it never goes back
            np.testing.assert_array_equal(codec.decode(params), version)
            self.held = version

    def close(self):
        self.client.close()
        self.tree.close()
        self.server.close()
        self.params.close()


@pytest.fixture
def hosts(tmp_path):
    """A learner, its port, and hosts that have its version 0."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(transports.chosen("zmq"))
        learner = Learner()
        server = stack.enter_context(serve(learner, bind_address="127.0.0.1"))
        made = [Host(f"host-{i}", server.address, tmp_path) for i in range(HOSTS)]
        for host in made:
            stack.callback(host.close)
            host.pull()
        yield learner, server.address.rpartition(":")[2], made


@pytest.mark.timeout(60)
def test_the_learner_sends_a_version_twice_instead_of_once_a_host(hosts):
    learner, port, hosts = hosts
    before = sent_by(port)
    for version in range(1, VERSIONS + 1):
        learner.version = version
        threads = [threading.Thread(target=host.pull) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert [host.held for host in hosts] == [version] * HOSTS
    sent = sent_by(port) - before
    assert 2 * VERSIONS * SIZE <= sent <= 2.1 * VERSIONS * SIZE  # before: HOSTS * VERSIONS * SIZE


@pytest.mark.timeout(60)
def test_a_lost_host_is_passed_over_and_named_to_nobody_for_a_while(hosts, monkeypatch):
    monkeypatch.setattr(timing, "PARAMS_SHARE_CALL", 0.5)
    learner, port, hosts = hosts
    lost, other, third, child = hosts[0], hosts[1], hosts[2], hosts[3]
    learner.version = 1
    lost.pull()
    other.pull()
    lost.server.close()
    before, begun = sent_by(port), time.monotonic()
    third.pull()  # its place is below the lost host
    assert third.held == 1 and time.monotonic() - begun < 3.0
    assert sent_by(port) - before >= SIZE
    learner.version = 2
    lost.pull()
    other.pull()
    third.pull()
    begun = time.monotonic()
    child.pull()
    assert child.held == 2 and time.monotonic() - begun < 0.5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("gives", [lambda _: None, lambda held: (held[0] - 1, held[1])])
def test_a_host_that_has_nothing_newer_is_passed_over(hosts, gives):
    learner, _, hosts = hosts
    learner.version = 1
    for host in hosts[:2]:
        host.pull()
        host.gives = gives
    hosts[2].pull()
    assert hosts[2].held == 1


def test_each_version_has_a_tree_in_which_everyone_sends_to_a_few():
    tree = ParamsTree(bytes_by_one=3_000)
    names = [f"10.0.0.{i}" for i in range(200)]
    for version, order in ((4, names), (5, names[::-1])):
        depth, children = {"": 0}, collections.Counter()
        for name in order:
            source = tree.source_of(version, 1_000, name, f"{name}:1")
            children[source] += 1
            depth[f"{name}:1"] = depth[source] + 1  # a KeyError if the source comes later
        assert max(children.values()) == 3 and max(depth.values()) == 5  # 3 + 9 + 27 + 81 + 80
        assert tree.source_of(version, 1_000, order[5], "moved:1") == f"{order[0]}:1"
        assert tree.source_of(version, 1_000, order[18], "x:1") == "moved:1"
    assert tree.source_of(4, 1_000, "10.0.0.250", "10.0.0.250:1") == ""  # an older version


def test_small_params_come_from_the_learner_and_hosts_that_start_ask_it():
    tree = ParamsTree()
    assert not any(tree.source_of(1, 37_184, f"h{i}", f"h{i}:1") for i in range(500))
    large = 10**9
    assert [tree.source_of(2, large, f"h{i}", f"h{i}:1") for i in range(3)] == ["", "", "h0:1"]
    assert tree.source_of(2, large, "starts", "") == ""
    tree.avoid("h1:1")
    assert tree.source_of(3, large, "h1", "h1:1") == ""
    assert [tree.source_of(3, large, f"h{i}", f"h{i}:1") for i in (0, 2, 3, 1)] == [
        "", "", "h0:1", "h0:1",
    ]  # fmt: skip
