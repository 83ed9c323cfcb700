"""Nodes of a Launchpad program; with the launcher, the only place that knows Launchpad.

A node is a class of `programs.nodes` with the arguments of its constructor, but the last one, the
event by which Launchpad ends a node. Handles among them become clients (`rlstack.rpc`) there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

import launchpad as lp
from launchpad import address as lp_address
from launchpad import context
from launchpad.nodes.dereference import Dereferenceable

from programs.nodes import supervise
from programs.nodes.line import Setup, incarnation, set_incarnation
from programs.nodes.replay import Reverb, ReverbNode
from rlstack.rpc import RemoteObject, Service
from rlstack.rpc.courier import Server
from rlstack.rpc.socket_filter import LOOPBACK, address_of

# Seconds in which a node ends after it was told to: those that hold nothing to lose, and others.
_GRACE, _GRACE_OF_OWNERS = 2.0, 7.0
_ASK_SECONDS = 2.0  # for the coordinator to say where a node is
_THREADS = (context.LaunchType.LOCAL_MULTI_THREADING, context.LaunchType.TEST_MULTI_THREADING)


class _Runs:
    """What nodes add to Launchpad's: a record of failures, and restarts where they are safe."""

    setup: Setup
    name: str
    restartable: bool
    niceness: int = 0
    _instance: Any

    def run(self) -> None:
        """Runs the node; in a thread, again and again where that is safe."""
        launch = self.setup.experiment.program.launch
        if launch == "ray":  # whose launcher writes failures down, and restarts
            super().run()  # type: ignore[misc]
            return
        if launch == "threads" and self.restartable:
            self._run_again_and_again()
            return
        try:
            super().run()  # type: ignore[misc]
        except BaseException as error:
            self._record(error, restarts=False)
            raise
        if launch != "threads":
            _leave()

    def _run_again_and_again(self) -> None:
        backoff = supervise.Backoff(self.setup.experiment.program.max_restarts)
        stop = lp.stop_event()
        while not stop.is_set():
            begun = time.monotonic()
            set_incarnation(backoff.failures)
            self._instance = None
            try:
                super().run()  # type: ignore[misc]
                return
            except Exception as error:
                pause = backoff.failed(time.monotonic() - begun)
                self._record(error, restarts=pause is not None)
                if pause is None:
                    raise
                stop.wait(pause)

    def _record(self, error: BaseException, *, restarts: bool) -> None:
        supervise.record_failure(
            str(self.setup.directory.failures),
            node=self.name,
            incarnation=incarnation(),
            reason=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
            restarts=restarts,
        )

    @staticmethod
    def to_executables(nodes: Sequence[Any], label: str, launch_context: Any) -> list[Any]:
        """Puts processes under a supervisor, which restarts them or writes down how they ended."""
        executables = lp.PyNode.to_executables(nodes, label, launch_context)
        if launch_context.launch_type in _THREADS:
            return executables
        return [_supervised(node, c) for node, c in zip(nodes, executables, strict=True)]


def _leave() -> None:
    """Ends the process, all but the interpreter's taking down of itself.

    In that, threads of Courier and of JAX may still touch what is no more, and abort.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _supervised(node: _Runs, launched: Any) -> Any:
    # A debugger that waits for input would keep a failed node alive.
    command = [part for part in launched.command_as_list if part != "--pdb_post_mortem"]
    limit = node.setup.experiment.program.max_restarts if node.restartable else 0
    grace = _GRACE if node.restartable else _GRACE_OF_OWNERS
    record = str(node.setup.directory.failures)
    supervisor = [sys.executable, supervise.__file__, record, node.name, str(limit), str(grace)]
    nice = shutil.which("nice") if node.niceness else None
    steps_back = [nice, "-n", str(node.niceness)] if nice else []
    launched.command_as_list[:] = [*supervisor, *steps_back, *command]
    return launched


class WorkerNode(_Runs, lp.PyClassNode):
    """A node that nobody calls."""

    def __init__(
        self, cls: type, setup: Setup, *args: Any, name: str, restartable: bool = False
    ) -> None:
        super().__init__(_Construct(cls), setup, *args)
        self.setup, self.name, self.restartable = setup, name, restartable
        self.niceness = getattr(cls, "niceness", 0)


class _CourierNode(lp.CourierNode):
    """Launchpad's, but for its server, which answers at one address."""

    setup: Setup

    def run(self) -> None:
        """Serves until the object's `run` has ended."""
        port, bind_address = _listen(self.setup, self._address.resolve())
        instance = self._construct_instance()
        with Server(instance, port, bind_address):
            instance.run()


class ServiceNode(_Runs, _CourierNode):
    """A node whose remote methods others call."""

    def __init__(
        self,
        cls: type,
        setup: Setup,
        *args: Any,
        name: str,
        restartable: bool = False,
        book: Any = None,
    ) -> None:
        """Takes what a worker does, and the coordinator's handle as `book` if the node may move."""
        super().__init__(_Construct(cls, serves=True), setup, *args)
        self.setup, self.name, self.restartable = setup, name, restartable
        self._cls, self._book = cls, book

    def create_handle(self) -> Any:
        """Returns what becomes a client in other nodes."""
        return self._track_handle(_ServiceHandle(self._address, self._cls, self.name, self._book))


class _ServiceHandle(lp.CourierHandle):
    def __init__(self, address: lp_address.Address, cls: type, name: str, book: Any) -> None:
        super().__init__(address)
        self._cls, self._name, self._book = cls, name, book

    @property
    def address(self) -> str:
        """Where the node answers, once the program is launched."""
        return self._address.resolve()

    def dereference(self) -> RemoteObject:
        find = None if self._book is None else _Find(self._book.dereference(), self._name)
        return RemoteObject(self._address.resolve(), self._cls, name=self._name, find=find)


class _Find:
    """Asks the coordinator where a node is now."""

    def __init__(self, coordinator: RemoteObject, name: str) -> None:
        self._coordinator, self._name = coordinator, name

    def __call__(self) -> str:
        return self._coordinator.call("locate", (self._name,), timeout=_ASK_SECONDS)


class ReplayNode(_Runs, lp.PyClassNode):
    """A Reverb server, without the TensorFlow that Launchpad's own such node loads."""

    def __init__(self, setup: Setup, coordinator: Any) -> None:
        self._address = lp_address.Address("reverb")
        super().__init__(_Construct(ReverbNode), setup, _Listen(setup, self._address), coordinator)
        self.allocate_address(self._address)
        self.setup, self.name, self.restartable = setup, "replay", False

    def create_handle(self) -> Any:
        """Returns what becomes a `programs.nodes.replay.Reverb` in other nodes."""
        return self._track_handle(_ReplayHandle(self.setup, self._address))


class _Listen(Dereferenceable):
    """Becomes a port, and the address of this host at which to answer, in the node."""

    def __init__(self, setup: Setup, address: lp_address.Address) -> None:
        self._setup, self._address = setup, address

    def dereference(self) -> tuple[int, str]:
        return _listen(self._setup, self._address.resolve())


def _listen(setup: Setup, bound: str) -> tuple[int, str]:
    """Returns a node's port, and where it answers: by the config, or where others call."""
    host = bound.rsplit(":", 1)[0]
    interface = setup.experiment.program.interface or host
    bind_address = LOOPBACK if interface == "localhost" else address_of(interface)
    return lp_address.get_port_from_address(bound), bind_address


class _ReplayHandle(lp.CourierHandle):
    def __init__(self, setup: Setup, address: lp_address.Address) -> None:
        super().__init__(address)
        self._setup = setup

    def dereference(self) -> Reverb:
        return Reverb(self._setup, self._address.resolve())


class _Construct:
    """Makes a node's object, in the node."""

    def __init__(self, cls: type, *, serves: bool = False) -> None:
        self._cls, self._serves = cls, serves

    def __call__(self, *args: Any) -> Any:
        instance = self._cls(*args, _stop_event())
        return Service(instance) if self._serves else instance


_own = threading.local()


def set_stop_event(event: threading.Event) -> None:
    """Gives the node in this thread its end, where no Launchpad runs that would have one."""
    _own.stop_event = event


def _stop_event() -> threading.Event:
    return getattr(_own, "stop_event", None) or lp.stop_event()
