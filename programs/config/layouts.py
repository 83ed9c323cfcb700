"""The topologies. This module imports nothing, because a launcher reads it before all else."""

from __future__ import annotations

from typing import Literal, NamedTuple

Topology = Literal["single_process", "fused", "heavy_env", "light_env", "distributed"]


class Layout(NamedTuple):
    """How a topology divides acting and learning; nothing else compares its name.

    is_compiled: True if one compiled program acts and learns, with environments in JAX.
    has_nodes: True for a program of several nodes, False for a loop in one process.
    has_services: True if actors share inference services, False if each actor infers by itself.
    has_replay_node: True if the replay is a node, for several hosts; False if it is memory that
      the learner shares with the actors.
    """

    is_compiled: bool = False
    has_nodes: bool = False
    has_services: bool = False
    has_replay_node: bool = False


LAYOUTS: dict[str, Layout] = {
    "single_process": Layout(),
    "fused": Layout(is_compiled=True),
    "heavy_env": Layout(has_nodes=True),
    "light_env": Layout(has_nodes=True, has_services=True),
    "distributed": Layout(has_nodes=True, has_services=True, has_replay_node=True),
}
