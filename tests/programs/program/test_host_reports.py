"""The nodes of a host report together: one call for all, and nobody depends on who makes it.

Threads stand for the processes: the locks belong to open files, not to processes.
"""

import copy
import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlstack.programs.config.presets import preset
from rlstack.programs.program import base, host
from rlstack.programs.program.base import OVER, RUNNING, SAVING, CoordinatorClient
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.host import HostReports, Report
from rlstack.programs.session import timing
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import RemoteObject, UnavailableError, remote, serve, transports
from rlstack.storage.loggers import InMemoryLogger
from tests.rpc.nodes import becomes

NODES = 8


def experiment(actors=32, pacing="asynchronous", frames=10**9):
    chosen = preset("cartpole-ppo")
    program = dataclasses.replace(chosen.program, num_actors=actors, pacing=pacing)
    return dataclasses.replace(chosen, topology="distributed", frames=frames, program=program)


class Counting(Coordinator):
    """A coordinator that counts calls, and may keep them waiting."""

    def __init__(self, tmp_path, **changes):
        self.logger, self.calls, self.free = InMemoryLogger(), [], threading.Event()
        self.free.set()
        super().__init__(experiment(**changes), RunDir(tmp_path / "run"), self.logger)

    @remote()
    def report(self, *args):
        self.calls.append(1)
        return super().report(*copy.deepcopy(args))

    @remote(idempotent=True)
    def report_all(self, reports):
        self.calls.append(len(reports))
        self.free.wait(20.0)
        return super().report_all(reports)

    @property
    def host(self):
        return "127.0.0.1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The parent of the hosts' folders."""
    made = tmp_path / "memory"
    made.mkdir()
    init = host.HostFolder.__init__
    monkeypatch.setattr(host.HostFolder, "__init__", lambda self, name, _: init(self, name, made))
    return made


def clients_of(coordinator, names):
    return [CoordinatorClient(coordinator, name, threading.Event()) for name in names]


@pytest.mark.timeout(60)
def test_a_host_makes_one_call_a_period_with_the_reports_of_all_its_nodes(tmp_path, folder):
    coordinator = Counting(tmp_path)
    with transports.chosen("zmq"), serve(coordinator, bind_address="127.0.0.1") as server:
        remotes = [RemoteObject(server.address, Coordinator, name="c") for _ in range(NODES)]
        clients = [
            CoordinatorClient(remote, f"actor/{rank}", threading.Event())
            for rank, remote in enumerate(remotes)
        ]
        for client in clients:
            client.poll()
        coordinator.calls.clear()
        begun, steps, states = time.monotonic(), 0, set()
        while (seconds := time.monotonic() - begun) < 1.5:
            steps += 1
            for client in clients:
                client.count(env_frames=float(steps))
                states.add(client.poll().env_frames)
            time.sleep(0.005)
        calls = list(coordinator.calls)
        for client in clients:
            client.report_end()
            client.close()
        for made in remotes:
            made.close()
    assert 2 <= len(calls) <= seconds / timing.REPORT_PERIOD + 2  # before: NODES calls a period
    assert max(calls) == NODES
    assert coordinator.status()["env_frames"] == NODES * steps
    assert len(states) > 2 and coordinator.wait_until_left(0)
    assert list(folder.iterdir()) == []  # the last one has removed the host's folder


@pytest.mark.parametrize(
    "changes", [{"actors": 31}, {"pacing": "lock_step"}], ids=["few nodes", "lock-step"]
)
def test_few_nodes_and_lock_step_report_at_once_as_before(tmp_path, folder, changes):
    coordinator = Counting(tmp_path, **changes)
    (client,) = clients_of(coordinator, ["actor/0"])
    for frames in (0, 5, 9):
        client.count(env_frames=frames)
        assert client.poll(waits=True).env_frames == frames
    assert coordinator.calls == [1, 1, 1] and list(folder.iterdir()) == []


def test_learners_and_reports_that_cannot_wait_go_at_once(tmp_path, folder):
    coordinator = Counting(tmp_path)
    learner, actor = clients_of(coordinator, ["learner", "actor/0"])
    learner.poll()
    actor.poll()
    learner.count(learner_steps=7)
    learner.poll(now=True)
    actor.count(env_frames=12)
    assert actor.poll(now=True).env_frames == 12
    assert coordinator.status()["nodes"]["learner"]["restarts"] == 0
    assert len(list(folder.iterdir())) == 1 and coordinator.newest_version("learner") == 7
    actor.close()


def test_answers_grants_phases_and_logs_are_those_of_each_node(tmp_path, folder):
    """32 actors of 8 environments and unrolls of 32, so an actor's first grant is 256 frames."""
    coordinator = Counting(tmp_path, frames=5000)
    clients = clients_of(coordinator, [f"actor/{rank}" for rank in range(3)])
    for client in clients:
        client.poll()
    for rank, client in enumerate(clients):
        client.count(env_frames=100 * rank)
        client.log({"actor/episode_return": [float(rank)] * rank})
        client.gauges = lambda rank=rank: {"params/version": rank}
    assert becomes(lambda: [c.poll().env_frames for c in clients] == [300] * 3, 5.0)
    assert [c.poll().granted for c in clients] == [256, 100 + 400, 200 + 800]
    assert [c.poll().episodes for c in clients] == [3, 3, 3]  # logs count once
    assert coordinator.newest_version("learner") == 0
    nodes = coordinator.status()["nodes"]
    assert [nodes[f"actor/{rank}"]["pid"] for rank in range(3)] == [os.getpid()] * 3
    clients[0].count(env_frames=4900)
    assert becomes(lambda: {c.poll().phase for c in clients} == {SAVING}, 5.0)
    for client in clients:
        client.close()


def test_a_replaced_node_learns_that_it_is_over_and_others_go_on(tmp_path, folder):
    coordinator = Counting(tmp_path)
    old, other = clients_of(coordinator, ["actor/0", "actor/1"])
    old.poll()
    other.poll()
    base.set_incarnation(1)
    try:
        (new,) = clients_of(coordinator, ["actor/0"])
    finally:
        base.set_incarnation(0)
    old.count(env_frames=40)
    assert becomes(lambda: old.poll().env_frames == 40, 5.0)
    new.poll()
    assert becomes(lambda: old.poll().phase == OVER, 5.0)
    new.count(env_frames=2)
    assert becomes(lambda: [c.poll().env_frames for c in (new, other)] == [42, 42], 5.0)
    assert new.poll().phase == RUNNING
    for client in (old, new, other):
        client.close()


def test_a_late_report_of_a_sender_that_was_stopped_counts_for_nothing(tmp_path):
    coordinator = Counting(tmp_path)
    late = Report("actor/0", 0, 1, {"env_frames": 30.0}, {}, {"x": np.ones(1)}, 1, 1)
    encoded = base.codec.encode(tuple(late))
    coordinator.report_all([encoded])
    state, granted = coordinator.report_all([encoded])  # the answer was lost
    assert state["env_frames"] == 30 and granted == [30 + 256]
    coordinator.report(*late._replace(counts={"env_frames": 50.0, "ended": 1.0}, number=3))
    for _ in range(2):
        assert coordinator.report_all([encoded])[0]["env_frames"] == 50
    assert coordinator.wait_until_left(0)


KILLED = """
import os, sys
from rlstack.programs.program.host import HostReports, Report
def send(reports):
    print("sending", flush=True)
    os.kill(os.getpid(), 9)
reports = HostReports("one", "actor/0", send, sys.argv[1])
reports.post(Report("actor/0", 0, 1, {"env_frames": 7.0}, {}, {}, 0, 5))
reports.look(0.2)
"""


@pytest.mark.timeout(60)
def test_another_node_sends_if_the_one_that_sends_is_killed_and_its_report_too(tmp_path):
    sent = []

    def send(reports):
        sent.append([Report(*base.codec.decode(report)) for report in reports])
        return {"phase": RUNNING}, [3] * len(reports)

    other = HostReports("one", "actor/1", send, str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, timeout=40, check=False, stdout=subprocess.PIPE)
    assert (killed.returncode, killed.stdout) == (-9, b"sending\n")
    other.post(Report("actor/1", 0, 2, {}, {}, {}, 0, 1))
    answer = other.look(0.2)
    assert (answer.number, answer.granted) == (1, 3)
    (reports,) = sent
    assert {(r.node, r.number) for r in reports} == {("actor/0", 5), ("actor/1", 1)}
    other.post(Report("actor/1", 0, 2, {}, {}, {}, 0, 2))
    time.sleep(0.05)
    other.look(0.05)
    assert [report.node for report in sent[1]] == ["actor/1"]  # that of the killed one went once
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_nodes_report_by_themselves_while_the_one_that_sends_hangs(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(timing, "SHARED_PARAMS", 0.3)
    coordinator = Counting(tmp_path)
    first, second = clients_of(coordinator, ["actor/0", "actor/1"])
    first.poll()
    second.poll()
    coordinator.free.clear()
    thread = threading.Thread(target=first.poll, kwargs={"waits": True})
    thread.start()
    assert becomes(lambda: len(coordinator.calls) == 3, 5.0)
    second.count(env_frames=11)
    assert becomes(lambda: second.poll().env_frames == 11, 5.0)
    coordinator.free.set()
    thread.join(10.0)
    assert becomes(lambda: first.poll().env_frames == 11, 5.0)
    first.close()
    second.close()


def test_a_coordinator_that_does_not_answer_is_lost_to_all_nodes_of_a_host(
    tmp_path, folder, monkeypatch
):
    monkeypatch.setattr(timing, "SHARED_PARAMS", 0.2)
    monkeypatch.setattr(timing, "COORDINATOR_LOST_TO_OTHERS", 0.5)
    coordinator = Counting(tmp_path)
    clients = clients_of(coordinator, ["actor/0", "actor/1"])
    for client in clients:
        client.poll()

    def refuse(*_):
        raise UnavailableError("coordinator: no answer")

    for client in clients:
        monkeypatch.setattr(client._host, "_send", refuse)
    monkeypatch.setattr(coordinator, "report", refuse)
    assert becomes(lambda: [c.poll().phase for c in clients] == [OVER] * 2, 10.0)
    for client in clients:
        client.close()


def test_without_space_each_node_reports_by_itself(tmp_path, folder, monkeypatch):
    coordinator = Counting(tmp_path)
    (client,) = clients_of(coordinator, ["actor/0"])
    client.poll()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    client.count(env_frames=5)
    assert client.poll(waits=True).env_frames == 5
    assert not list(Path(folder).rglob("new-*"))
    client.close()
