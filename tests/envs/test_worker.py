"""A worker process whose steps wait for one another; test_contract.py tests its pools."""

import select
import socket
import struct
import threading

import pytest

from rlstack.checks import EnvError
from rlstack.envs.process.protocol import BROKEN
from rlstack.envs.process.worker import _orders, _run_concurrently

RECEIVED = struct.Struct("<i")


class Episode:
    def __init__(self):
        self.interrupted = threading.Event()
        self.interrupt = self.interrupted.set


def started(step, episodes):
    """A worker's loop in a thread; returns the parent's socket and the thread."""
    parent, child = socket.socketpair()
    parent.settimeout(10)
    arguments = (child, _orders(child), step, episodes)
    thread = threading.Thread(target=_run_concurrently, args=arguments)
    thread.start()
    return parent, thread


@pytest.mark.timeout(30)
def test_a_step_may_wait_for_an_order_that_comes_later():
    second = threading.Event()

    def step(order):
        if order == 2:
            second.set()
        assert second.wait(10)
        return RECEIVED.pack(order)

    episodes = [Episode(), Episode()]
    parent, thread = started(step, episodes)
    parent.sendall(RECEIVED.pack(1))
    assert not select.select([parent], [], [], 0.1)[0]
    parent.sendall(RECEIVED.pack(2))
    answers = {RECEIVED.unpack(parent.recv(4))[0] for _ in range(2)}
    assert answers == {1, 2}
    parent.close()
    thread.join(10)
    assert not thread.is_alive()
    assert all(episode.interrupted.is_set() for episode in episodes)


@pytest.mark.timeout(30)
def test_the_first_failure_is_told_and_ends_all():
    episode = Episode()

    def step(order):
        if order == 2:
            raise EnvError("no such choice")
        assert episode.interrupted.wait(10)
        raise RuntimeError("the step was interrupted")

    parent, thread = started(step, [episode, Episode()])
    parent.sendall(RECEIVED.pack(1) + RECEIVED.pack(2))
    told = b""
    while part := parent.recv(4096):
        told += part
    assert RECEIVED.unpack(told[:4])[0] == BROKEN
    assert b"no such choice" in told and b"interrupted" not in told
    parent.close()
    thread.join(10)
    assert not thread.is_alive()
