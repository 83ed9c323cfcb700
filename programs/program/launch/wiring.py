"""Runs one node of a program: makes clients of the nodes that it calls, its object and its server.

A `Program` can be pickled, so that each node's process needs only it and the node's name.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlstack.programs.program import base
from rlstack.programs.program.base import Setup
from rlstack.programs.program.graph import Graph, Handle, Node, with_clients
from rlstack.programs.session import timing
from rlstack.rpc import RemoteObject, StoppedError, serve
from rlstack.rpc.addresses import LOOPBACK, reserve_port, split
from rlstack.rpc.socket_filter import address_of


class Program(NamedTuple):
    """A graph with the addresses of its nodes."""

    nodes: Sequence[Node]
    setup: Setup
    addresses: Mapping[str, str]  # "host:port" of each node that others may call

    def named(self, name: str) -> Node:
        """Returns a node."""
        return next(node for node in self.nodes if node.name == name)


def indexed(graph: Graph) -> list[tuple[Node, int]]:
    """Returns each node with its index in its group."""
    groups: dict[str, int] = {}
    found = []
    for node in graph.nodes:
        found.append((node, groups.setdefault(node.group, 0)))
        groups[node.group] += 1
    return found


@contextlib.contextmanager
def on_this_host(graph: Graph, setup: Setup) -> Iterator[Program]:
    """Gives each node that others call a port of this host, which nobody else gets until the end.

    Yields:
      The program.
    """
    ports = setup.experiment.program.port_range
    with contextlib.ExitStack() as reserved:
        addresses = {
            node.name: f"{LOOPBACK}:{reserved.enter_context(reserve_port(ports))}"
            for node in graph.nodes
            if node.kind != "worker"
        }
        yield Program(graph.nodes, setup, addresses)


def run_node(program: Program, name: str, stop: threading.Event) -> None:
    """Makes a node's object and runs it to its end.

    Args:
      program: the program, with the addresses of all nodes that this one calls.
      name: the name of the node.
      stop: ends the node early once it is set.

    Raises:
      EndedEarlyError: nobody has told the node to end.
    """
    try:
        _run(program, program.named(name), stop)
        base.check_end()
    finally:
        base.close_client()


def _run(program: Program, node: Node, stop: threading.Event) -> None:
    with contextlib.suppress(StoppedError):  # the program ended while the node started
        # Elsewhere a node that waits for one that has failed is killed with its process.
        in_thread = program.setup.experiment.program.launch == "threads"
        client_of = functools.partial(_client, program, stop if in_thread else None)
        args = [with_clients(a, client_of) for a in node.args]
        if node.kind == "server":
            args.append(_listen_on(program, node.name))
        instance: Any = node.cls(*args, stop)
        if node.kind != "service":
            instance.run()
        else:
            port, address = _listen_on(program, node.name)
            with serve(instance, port=port, bind_address=address):
                instance.address = program.addresses[node.name]
                instance.run()


def _client(program: Program, stop: threading.Event | None, handle: Handle) -> Any:
    """Returns a client of another node."""
    callee = program.named(handle.node)
    address = program.addresses[callee.name]
    if callee.client is not None:
        return callee.client(address)
    find = None
    if callee.restartable and program.setup.experiment.program.launch == "ray":
        # Ray may restart it on another host; clients then ask the coordinator for its address.
        coordinator = _client(program, stop, Handle("coordinator"))
        find = functools.partial(_locate, coordinator, callee.name)
    return RemoteObject(address, callee.cls, name=callee.name, find=find, stop=stop)


def _locate(coordinator: RemoteObject, name: str) -> str:
    return str(coordinator.call("locate", (name,), timeout=timing.ASK_COORDINATOR))


def _listen_on(program: Program, name: str) -> tuple[int, str]:
    """Returns (port, address to listen on): by the config, or the address that callers use."""
    return listen_on(program.setup, program.addresses[name])


def listen_on(setup: Setup, address: str) -> tuple[int, str]:
    """Returns the port and the numeric address at which a node listens.

    Args:
      setup: the program's setup, whose config may name an interface.
      address: the "host:port" that callers use.
    """
    host, port = split(address)
    interface = setup.experiment.program.interface or host
    return int(port), LOOPBACK if interface == "localhost" else address_of(interface)
