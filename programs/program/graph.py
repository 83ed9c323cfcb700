"""A program as plain data: its nodes, which nodes call which, and which may be restarted.

A topology (`rlstack.programs.program.topologies`) describes a program; a launcher
(`rlstack.programs.program.launch`) runs it. This module depends on neither, nor on how nodes call
one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Handle:
    """Represents a node in the arguments of other nodes; launchers replace it by a client."""

    node: str  # the node's name


@dataclasses.dataclass(frozen=True)
class Node:
    """One node: a class and the arguments of its constructor.

    A launcher constructs the object where the node runs and calls its ``run()``, which returns at
    the end of the program. The constructor's last argument is a `threading.Event`, which the
    launcher sets to end the node early.
    """

    name: str  # GROUP, or GROUP/INDEX where a group has several nodes
    cls: type
    # The constructor's arguments, with a `Handle` for every node that this one calls. Handles may
    # also be the values of a dict.
    args: tuple[object, ...]
    kind: Literal["worker", "service", "server"]
    # True if the node holds nothing that the program needs, or can restore it.
    restartable: bool = False
    client: Callable[[str], object] | None = None  # for servers: makes a client for an address

    @property
    def group(self) -> str:
        """The nodes of one group do the same work and need the same resources."""
        return self.name.split("/")[0]


def with_clients(argument: object, client_of: Callable[[Handle], object]) -> object:
    """Returns an argument of a node with each handle in it replaced by what ``client_of`` makes."""
    if isinstance(argument, Handle):
        return client_of(argument)
    if isinstance(argument, dict):
        return {name: with_clients(value, client_of) for name, value in argument.items()}
    return argument


class Graph:
    """The nodes of one program, in the order in which they were added.

    Attributes:
      name: the name of the topology.
      nodes: all nodes so far.
    """

    def __init__(self, name: str) -> None:
        """Starts without nodes."""
        self.name = name
        self.nodes: list[Node] = []

    def worker(self, name: str, cls: type, *args: object, restartable: bool = False) -> None:
        """Adds a node that no other node calls."""
        self.nodes.append(Node(name, cls, args, "worker", restartable))

    def service(self, name: str, cls: type, *args: object, restartable: bool = False) -> Handle:
        """Adds a node whose methods marked with `rlstack.rpc.remote` other nodes call."""
        self.nodes.append(Node(name, cls, args, "service", restartable))
        return Handle(name)

    def server(
        self, name: str, cls: type, *args: object, client: Callable[[str], object]
    ) -> Handle:
        """Adds a node with a server of its own.

        Args:
          name: the name of the node.
          cls: the class. Its constructor takes the tuple (port, address) to listen on, before
            the stop event.
          *args: the constructor's arguments before this tuple.
          client: makes a client from the address "host:port", in a node that has the handle.
        """
        self.nodes.append(Node(name, cls, args, "server", client=client))
        return Handle(name)
