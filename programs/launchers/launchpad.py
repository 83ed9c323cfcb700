"""A program's graph as a Launchpad program: its nodes become Launchpad nodes.

A node's handles become Launchpad handles. The node that receives them gets clients (`rlstack.rpc`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import launchpad as lp
from launchpad import address as lp_address
from launchpad import context
from launchpad.nodes.dereference import Dereferenceable

from programs import timing
from programs.graph import Graph, Handle, Node
from programs.launchers import titled
from programs.nodes import base, supervisor
from programs.nodes.base import Setup
from programs.nodes.ending import end_of
from rlstack.rpc import RemoteObject, Service, StoppedError, transports
from rlstack.rpc.socket_filter import LOOPBACK, address_of

_THREADS = (context.LaunchType.LOCAL_MULTI_THREADING, context.LaunchType.TEST_MULTI_THREADING)


class LaunchpadProgram(NamedTuple):
    """A Launchpad program and the address of its coordinator, which Launchpad binds later."""

    program: lp.Program
    coordinator: lp_address.Address


def build(graph: Graph, setup: Setup) -> LaunchpadProgram:
    """Returns the graph as a Launchpad program, with real Launchpad nodes."""
    program = lp.Program(graph.name)
    made: dict[str, lp.PyClassNode] = {}
    handles: dict[str, Any] = {}
    for node in graph.nodes:
        args = [handles[a.node] if isinstance(a, Handle) else a for a in node.args]
        made[node.name] = _make_node(node, args, setup, handles)
        with program.group(node.group):
            handles[node.name] = program.add_node(made[node.name])
    return LaunchpadProgram(program, made["coordinator"].addresses[0])


def _make_node(
    node: Node, args: Sequence[object], setup: Setup, handles: dict[str, Any]
) -> lp.PyClassNode:
    if node.kind == "worker":
        return WorkerNode(node, args, setup)
    if node.kind == "server":
        return ServerNode(node, args, setup)
    # Ray may restart a node on another host; clients then ask the coordinator for its address.
    moves = node.restartable and setup.experiment.program.launch == "ray"
    return ServiceNode(node, args, setup, handles["coordinator"] if moves else None)


class _ProgramNode:
    """Adds to Launchpad's nodes: records of failures, and restarts where they are safe."""

    setup: Setup
    name: str
    restartable: bool
    niceness: int
    _instance: Any

    def _describe(self, node: Node, setup: Setup) -> None:
        self.setup, self.name, self.restartable = setup, node.name, node.restartable
        self.niceness = getattr(node.cls, "niceness", 0)

    def run(self) -> None:
        """Runs the node; in a thread, restarts it after failures where that is safe."""
        launch = self.setup.experiment.program.launch
        if launch == "ray":  # its launcher records failures and restarts nodes
            self._run_once()
        elif launch == "threads":
            self._run_with_restarts()
        else:
            self._run_in_process()

    def _run_once(self) -> None:
        with contextlib.suppress(StoppedError):  # the program ended while the node started
            super().run()  # type: ignore[misc]
        base.check_end()

    def _run_in_process(self) -> None:
        """Runs the node and ends this process; the supervisor records and restarts."""
        code, end = 0, supervisor.End(ordered=True)
        try:
            self._run_once()
            if _stop_event().is_set():  # by a signal; the supervisor knows who sent it
                end = supervisor.STOPPED
        except BaseException as error:
            code, end = 1, end_of(error, base.ran_seconds())
            with contextlib.suppress(OSError):  # the log may be on a full disk
                traceback.print_exc()
        supervisor.tell(end)
        _exit_process(code)

    def _run_with_restarts(self) -> None:
        limit = self.setup.experiment.program.max_restarts if self.restartable else 0
        restarts = supervisor.RestartPolicy(limit, *timing.RESTARTS)
        stop = lp.stop_event()
        while not stop.is_set():
            started = time.monotonic()
            incarnation = restarts.failures
            base.set_incarnation(incarnation)
            self._instance = None
            try:
                self._run_once()
                return
            except BaseException as error:  # also SystemExit, which ends a thread without a trace
                end = end_of(error, base.ran_seconds())
                pause = restarts.failed(time.monotonic() - started, end)
                path = str(self.setup.directory.failures)
                fields = {"restarts": pause is not None, "pause": pause, "ending": stop.is_set()}
                supervisor.record_failure(
                    path, node=self.name, end=end, incarnation=incarnation, **fields
                )
                if pause is None:  # not as SystemExit, which would end the whole command
                    raise RuntimeError(f"{self.name}: {end.reason}") from error
                stop.wait(pause)

    @staticmethod
    def to_executables(nodes: Sequence[Any], label: str, launch_context: Any) -> list[Any]:
        """Puts processes under a supervisor, which restarts them or records how they ended."""
        executables = lp.PyNode.to_executables(nodes, label, launch_context)
        if launch_context.launch_type in _THREADS:
            return executables
        return [_supervised(node, c) for node, c in zip(nodes, executables, strict=True)]


def _exit_process(code: int) -> None:
    """Ends the process without the interpreter's own teardown.

    During teardown, threads of Courier and of JAX may access freed memory and abort.
    """
    with contextlib.suppress(BaseException):  # as for a log on a full disk
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _supervised(node: _ProgramNode, launched: Any) -> Any:
    # A debugger that waits for input would keep a failed node alive.
    command = [part for part in launched.command_as_list if part != "--pdb_post_mortem"]
    limit = node.setup.experiment.program.max_restarts if node.restartable else 0
    grace = timing.GRACE if node.restartable else timing.GRACE_TO_SAVE
    record = str(node.setup.directory.failures)
    silence = node.setup.experiment.program.silence_seconds
    times = map(str, (grace, silence, limit, *timing.RESTARTS))
    prefix = [sys.executable, supervisor.__file__, record, node.name, *times]
    if node.niceness and (nice := shutil.which("nice")):
        prefix += [nice, "-n", str(node.niceness)]
    name = titled.title(node.name, str(node.setup.directory.path))
    python, *script = command
    launched.command_as_list[:] = [*prefix, python, titled.__file__, name, *script]
    return launched


class WorkerNode(_ProgramNode, lp.PyClassNode):
    """A node that no other node calls."""

    def __init__(self, node: Node, args: Sequence[object], setup: Setup) -> None:
        super().__init__(_Construct(node.cls), *args)
        self._describe(node, setup)


class _CourierNode(lp.CourierNode):
    """Launchpad's node with our server, which listens on one address of the host only."""

    setup: Setup

    def run(self) -> None:
        """Serves until the object's `run` has returned."""
        port, bind_address = _listen_on(self.setup, self._address.resolve())
        instance = self._construct_instance()
        with transports.start_server(instance, port, bind_address):
            instance.run()


class ServiceNode(_ProgramNode, _CourierNode):
    """A node whose remote methods other nodes call."""

    def __init__(
        self, node: Node, args: Sequence[object], setup: Setup, locator: Any = None
    ) -> None:
        """Takes the coordinator's handle as `locator` if the node may move to another host."""
        super().__init__(_Construct(node.cls, serves=True), *args)
        self._describe(node, setup)
        self._cls, self._locator = node.cls, locator

    def create_handle(self) -> Any:
        """Returns the handle that becomes a `RemoteObject` in other nodes."""
        return self._track_handle(
            _ServiceHandle(self._address, self._cls, self.name, self._locator)
        )


class _ServiceHandle(lp.CourierHandle):
    def __init__(self, address: lp_address.Address, cls: type, name: str, locator: Any) -> None:
        super().__init__(address)
        self._cls, self._name, self._locator = cls, name, locator

    def dereference(self) -> RemoteObject:
        """Returns a client of the node."""
        find = None if self._locator is None else _Locate(self._locator.dereference(), self._name)
        return RemoteObject(self._address.resolve(), self._cls, name=self._name, find=find)


class _Locate:
    """Asks the coordinator for the current address of a node."""

    def __init__(self, coordinator: RemoteObject, name: str) -> None:
        self._coordinator, self._name = coordinator, name

    def __call__(self) -> str:
        timeout = timing.ASK_COORDINATOR
        return str(self._coordinator.call("locate", (self._name,), timeout=timeout))


class ServerNode(_ProgramNode, lp.PyClassNode):
    """A node with a server of its own.

    For Reverb it replaces Launchpad's node, which would load TensorFlow.
    """

    def __init__(self, node: Node, args: Sequence[object], setup: Setup) -> None:
        self._address = lp_address.Address(node.name)
        super().__init__(_Construct(node.cls), *args, _Listen(setup, self._address))
        self.allocate_address(self._address)
        self._describe(node, setup)
        self._client = node.client

    def create_handle(self) -> Any:
        """Returns the handle that becomes the node's client in other nodes."""
        return self._track_handle(_ServerHandle(self._address, self._client))


class _Listen(Dereferenceable):
    """Resolves to (port, IPv4 address to listen on) inside the node."""

    def __init__(self, setup: Setup, address: lp_address.Address) -> None:
        self._setup, self._address = setup, address

    def dereference(self) -> tuple[int, str]:
        return _listen_on(self._setup, self._address.resolve())


def _listen_on(setup: Setup, address: str) -> tuple[int, str]:
    """Returns (port, IPv4 address to listen on): by the config, or the address that callers use."""
    host = address.rsplit(":", 1)[0]
    interface = setup.experiment.program.interface or host
    bind_address = LOOPBACK if interface == "localhost" else address_of(interface)
    return lp_address.get_port_from_address(address), bind_address


class _ServerHandle(lp.CourierHandle):
    def __init__(self, address: lp_address.Address, client: Any) -> None:
        super().__init__(address)
        self._client = client

    def dereference(self) -> Any:
        return self._client(self._address.resolve())


class _Construct:
    """Makes a node's object, in the node."""

    def __init__(self, cls: type, *, serves: bool = False) -> None:
        self._cls, self._serves = cls, serves

    def __call__(self, *args: Any) -> Any:
        instance = self._cls(*args, _stop_event())
        return Service(instance) if self._serves else instance


_thread = threading.local()


def set_stop_event(event: threading.Event) -> None:
    """Sets the stop event of the node in this thread, where Launchpad does not provide one."""
    _thread.stop_event = event


def _stop_event() -> threading.Event:
    return getattr(_thread, "stop_event", None) or lp.stop_event()
