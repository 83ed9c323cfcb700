"""A small program for tests of launchers: its nodes need no agent, so they start quickly."""

import threading
import time

from rlstack.programs.program import base
from rlstack.programs.program.base import OVER, RUNNING, SAVING
from rlstack.programs.program.graph import Graph
from rlstack.rpc import RemoteError, UnavailableError, remote

POLL = 0.05  # seconds


class Centre:
    """The coordinator: the program is over when a node or a signal says so."""

    def __init__(self, directory, stop):
        self._over, self._stop, self._directory = threading.Event(), stop, directory
        self._asked = 0

    @remote(idempotent=True)
    def status(self):
        self._asked += 1
        if self._asked > 1:  # so the display has had an answer
            (self._directory.path / "shown").touch()
        phase = OVER if self._over.is_set() else RUNNING
        return {"phase": phase, "env_frames": 0, "logs": {}, "notes": [], "nodes": {}}

    @remote(idempotent=True)
    def is_over(self):
        return self._over.is_set()

    @remote(idempotent=True)
    def interrupt(self, number):
        (self._directory.path / "interrupt").write_text(str(number))
        self._over.set()
        return SAVING

    @remote(idempotent=True)
    def end(self):
        self._over.set()

    def run(self):
        while not (self._over.is_set() or self._stop.wait(POLL)):
            pass
        time.sleep(10 * POLL)  # the others learn of it


class Doubler:
    """A service. It runs until the program is over, and says that it was told to end."""

    def __init__(self, directory, coordinator, stop):
        self._directory, self._coordinator, self._stop = directory, coordinator, stop
        self._runs = threading.Event()

    @remote(idempotent=True)
    def double(self, x):
        assert self._runs.wait(60.0)  # some launchers answer calls before `run`
        return 2 * x

    def run(self):
        print("doubling", flush=True)
        self._runs.set()
        while not self._stop.wait(POLL) and not is_over(self._coordinator):
            pass
        (self._directory.path / "told").touch()


class Worker:
    """It doubles a number, does what it is made for, and ends the program."""

    def __init__(self, directory, what, service, coordinator, stop):
        self._directory, self._what = directory, what
        self._service, self._coordinator, self._stop = service, coordinator, stop

    def run(self):
        until = time.monotonic() + 60.0  # the service may start later
        while True:
            try:
                doubled = self._service.double(21)
                break
            except UnavailableError:
                assert time.monotonic() < until
        incarnation = base.incarnation()
        (self._directory.path / f"worked-{incarnation}").write_text(str(doubled))
        if self._what == "fail" or (self._what == "fail once" and not incarnation):
            raise ArithmeticError("planned")
        if self._what == "wait":
            self._stop.wait(60.0)
        else:
            self._coordinator.end()


def is_over(coordinator):
    try:
        return coordinator.is_over()
    except (UnavailableError, RemoteError):
        return False


def small(directory, what, *, restartable=True):
    """A coordinator, a service and a worker.

    Args:
      directory: of the run.
      what: the worker does: "end", "wait", "fail" or "fail once".
      restartable: whether the worker may be started again.
    """
    graph = Graph("small")
    coordinator = graph.service("coordinator", Centre, directory)
    service = graph.service("learner", Doubler, directory, coordinator)
    graph.worker("actor/0", Worker, directory, what, service, coordinator, restartable=restartable)
    return graph
