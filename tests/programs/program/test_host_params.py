"""Processes of one host share params: the learner's link carries each version once a host.

Threads stand for the processes: the locks belong to open files, not to processes.
"""

import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rlstack.acting.params import ParamsPublisher, ParamsPuller, RemoteParams
from rlstack.programs.program.params import HostParams
from rlstack.rpc import RemoteObject, codec, remote, serve, transports
from tests.rpc.nodes import becomes

VERSIONS, HOSTS, SERVICES = 5, 2, 4
PARAMS = {"w": np.arange(100_000, dtype=np.float32)}


class Learner:
    """Publishes versions of the same params."""

    def __init__(self):
        self.version = 0
        self._publisher = ParamsPublisher(self, codec.encode)

    def get_params(self, newer_than=-1):
        return (self.version, PARAMS) if self.version > newer_than else None

    @remote(idempotent=True)
    def get(self, newer_than=-1):
        return self._publisher.get(newer_than)

    @property
    def stats(self):
        return self._publisher.stats()


def sent_by(port):
    """Payload that the TCP connections of a local port have sent, in bytes."""
    command = ["ss", "-tinH", "state", "established", f"( sport = :{port} )"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
    return sum(map(int, re.findall(r"\bbytes_sent:(\d+)", shown)))


def pull(tmp_path, shares):
    """Lets the services of two hosts pull some versions over TCP; returns (reads, bytes sent)."""
    learner, clients, hosts, pullers = Learner(), [], [], []
    with transports.chosen("zmq"), serve(learner, bind_address="127.0.0.1") as server:
        for host in range(HOSTS):
            for _ in range(SERVICES):
                clients.append(RemoteObject(server.address, Learner, name="learner"))
                get = clients[-1].get
                if shares:
                    hosts.append(HostParams(f"one-{host}", get, str(tmp_path)))
                    get = hosts[-1].get
                pullers.append(ParamsPuller(RemoteParams(get, codec.decode), 0.01))
        try:
            for version in range(1, VERSIONS):
                learner.version = version
                for puller in pullers:
                    assert puller.has_newer(version - 1, 20.0)
            for puller in pullers:
                version, params = puller.get_params()
                assert version == VERSIONS - 1
                np.testing.assert_array_equal(params["w"], PARAMS["w"])
            return learner.stats, sent_by(server.address.rpartition(":")[2]), hosts
        finally:
            for client in clients:
                client.close()
            for made in (*pullers, *hosts):
                made.close()


@pytest.mark.timeout(60)
def test_the_learners_link_carries_hosts_times_size_instead_of_services_times_size(tmp_path):
    alone, sent_alone, _ = pull(tmp_path, shares=False)
    shared, sent_shared, hosts = pull(tmp_path, shares=True)
    size = shared["publisher/bytes"]
    assert alone["publisher/reads"] == VERSIONS * HOSTS * SERVICES
    assert shared["publisher/reads"] == VERSIONS * HOSTS == sum(h.transfers for h in hosts)
    assert sent_alone >= VERSIONS * HOSTS * SERVICES * size
    # A few percent more than the params: the answers to polls, and what the transport adds.
    assert VERSIONS * HOSTS * size <= sent_shared <= 1.1 * VERSIONS * HOSTS * size
    assert list(tmp_path.iterdir()) == []  # the last of each host has removed its file


def test_another_takes_over_if_one_ends_and_nobody_waits_for_one_that_hangs(tmp_path):
    entered, free = threading.Event(), threading.Event()

    def hang(_):
        entered.set()
        free.wait(20.0)

    first = HostParams("x", hang, str(tmp_path), patience=0.3)
    second = HostParams("x", lambda held: (7, b"params"), str(tmp_path), patience=0.3)
    thread = threading.Thread(target=first.get, args=(-1,))
    thread.start()
    assert entered.wait(5.0)
    begun = time.monotonic()
    assert becomes(lambda: second.get(-1) == (7, b"params"), 5.0)
    assert time.monotonic() - begun >= 0.3
    free.set()
    thread.join()
    first.close()
    assert second.get(-1) == (7, b"params")
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_params_of_a_killed_program_are_removed_and_strangers_refused(tmp_path):
    code = (
        "import sys, os; from rlstack.programs.program.params import HostParams;"
        "HostParams('old', lambda held: (1, b'x'), sys.argv[1]).get(-1); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    (old,) = tmp_path.iterdir()
    assert (old / "params").exists() and old.stat().st_mode & 0o777 == 0o700
    new = HostParams("new", lambda held: None, str(tmp_path))
    assert not old.exists() and new.get(-1) is None
    new.close()
    old.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="only this user"):
        HostParams("old", lambda held: None, str(tmp_path))


def test_without_space_each_process_asks_by_itself(tmp_path, monkeypatch):
    host = HostParams("full", lambda held: (3, b"p"), str(tmp_path))

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    assert host.get(-1) == (3, b"p") and host.get(-1) == (3, b"p")
    assert host.transfers == 2
    assert not [path for path in next(tmp_path.iterdir()).iterdir() if "new" in path.name]
    host.close()
