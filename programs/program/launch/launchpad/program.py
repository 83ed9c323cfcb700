"""A program's graph as a Launchpad program: its nodes become Launchpad nodes.

A node's handles become Launchpad handles. The node that receives them gets clients (`rlstack.rpc`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import launchpad as lp
from launchpad import address as lp_address
from launchpad.nodes.dereference import Dereferenceable

from rlstack.programs.program import base
from rlstack.programs.program.base import Setup
from rlstack.programs.program.graph import Graph, Node, with_clients
from rlstack.programs.program.launch import node_process, processes, signs, wiring
from rlstack.programs.program.launch.launchpad import supervised, titled
from rlstack.programs.session import timing
from rlstack.rpc import RemoteObject, Service, StoppedError, transports


class LaunchpadProgram(NamedTuple):
    """A Launchpad program and the address of its coordinator, which Launchpad binds later."""

    program: lp.Program
    coordinator: lp_address.Address


def build(graph: Graph, setup: Setup) -> LaunchpadProgram:
    """Returns the graph as a Launchpad program, with real Launchpad nodes."""
    program = lp.Program(graph.name)
    made: dict[str, lp.PyClassNode] = {}
    handles: dict[str, Any] = {}
    kinds = {"worker": WorkerNode, "service": ServiceNode, "server": ServerNode}
    for node in graph.nodes:
        args = [with_clients(a, lambda handle: handles[handle.node]) for a in node.args]
        made[node.name] = kinds[node.kind](node, args, setup)
        with program.group(node.group):
            handles[node.name] = program.add_node(made[node.name])
    return LaunchpadProgram(program, made["coordinator"].addresses[0])


class FixedAddress(lp_address.AbstractAddressBuilder):
    """An address with a port that the launcher holds."""

    def __init__(self, port: int) -> None:
        self._address = f"localhost:{port}"

    def build(self) -> str:
        """Returns "host:port"."""
        return self._address


class _ProgramNode:
    """Adds to Launchpad's nodes: records of failures, and restarts where they are safe."""

    setup: Setup
    node: Node

    def run(self) -> None:
        """Runs the node and ends this process; the supervisor records and restarts."""
        node_process.run_to_end(self._run_once, lp.stop_event())

    def _run_once(self) -> None:
        try:
            with contextlib.suppress(StoppedError):  # the program ended while the node started
                super().run()  # type: ignore[misc]
            base.check_end()
        finally:
            base.close_client()

    @staticmethod
    def to_executables(nodes: Sequence[Any], label: str, launch_context: Any) -> list[Any]:
        """Puts processes under a supervisor, which restarts them or records how they ended."""
        executables = lp.PyNode.to_executables(nodes, label, launch_context)
        return [_supervised(node, c) for node, c in zip(nodes, executables, strict=True)]


def _supervised(made: _ProgramNode, launched: Any) -> Any:
    # A debugger that waits for input would keep a failed node alive.
    python, *script = [part for part in launched.command_as_list if part != "--pdb_post_mortem"]
    name = signs.title(made.node.name, str(made.setup.directory.path))
    cfg = made.setup.experiment.program
    limit = cfg.max_restarts if made.node.restartable else 0
    times = (processes.grace_of(made.node), cfg.silence_seconds, limit, *timing.RESTARTS)
    record = str(made.setup.directory.failures)
    prefix = [python, supervised.__file__, record, made.node.name, *map(str, times)]
    niceness = getattr(made.node.cls, "niceness", 0)
    if niceness and (nice := shutil.which("nice")):
        prefix += [nice, "-n", str(niceness)]
    launched.command_as_list[:] = [*prefix, python, titled.__file__, name, *script]
    return launched


class WorkerNode(_ProgramNode, lp.PyClassNode):
    """A node that no other node calls."""

    def __init__(self, node: Node, args: Sequence[object], setup: Setup) -> None:
        super().__init__(_Construct(node.cls), *args)
        self.node, self.setup = node, setup


class _CourierNode(lp.CourierNode):
    """Launchpad's node with our server, which listens on one address of the host only."""

    setup: Setup

    def run(self) -> None:
        """Serves until the object's `run` has returned."""
        port, bind_address = wiring.listen_on(self.setup, self._address.resolve())
        instance = self._construct_instance()
        with transports.start_server(instance, port, bind_address):
            instance.run()


class ServiceNode(_ProgramNode, _CourierNode):
    """A node whose remote methods other nodes call."""

    def __init__(self, node: Node, args: Sequence[object], setup: Setup) -> None:
        super().__init__(_Construct(node.cls, serves=True), *args)
        self.node, self.setup = node, setup

    def create_handle(self) -> Any:
        """Returns the handle that becomes a `RemoteObject` in other nodes."""
        return self._track_handle(_ServiceHandle(self._address, self.node))


class _ServiceHandle(lp.CourierHandle):
    def __init__(self, address: lp_address.Address, node: Node) -> None:
        super().__init__(address)
        self._cls, self._name = node.cls, node.name

    def dereference(self) -> RemoteObject:
        """Returns a client of the node."""
        return RemoteObject(self._address.resolve(), self._cls, name=self._name)


class ServerNode(_ProgramNode, lp.PyClassNode):
    """A node with a server of its own.

    For Reverb it replaces Launchpad's node, which would load TensorFlow.
    """

    def __init__(self, node: Node, args: Sequence[object], setup: Setup) -> None:
        self._address = lp_address.Address("server")  # it need not be unique, as Courier's
        super().__init__(_Construct(node.cls), *args, _Listen(setup, self._address))
        self.allocate_address(self._address)
        self.node, self.setup = node, setup

    def create_handle(self) -> Any:
        """Returns the handle that becomes the node's client in other nodes."""
        return self._track_handle(_ServerHandle(self._address, self.node.client))


class _Listen(Dereferenceable):
    """Resolves to (port, address to listen on) inside the node."""

    def __init__(self, setup: Setup, address: lp_address.Address) -> None:
        self._setup, self._address = setup, address

    def dereference(self) -> tuple[int, str]:
        return wiring.listen_on(self._setup, self._address.resolve())


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
        instance = self._cls(*args, lp.stop_event())
        return Service(instance) if self._serves else instance
