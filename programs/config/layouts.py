"""The topologies. This module imports nothing, because a launcher reads it before all else."""

from __future__ import annotations

from typing import Literal, NamedTuple

Topology = Literal["single_process", "fused", "heavy_env", "light_env", "distributed"]


class Layout(NamedTuple):
    """How a topology divides acting and learning; nothing else compares its name.

    is_compiled: whether one compiled program acts and learns, in environments in JAX.
    has_nodes: whether it is a program of several nodes, otherwise a loop in one process.
    has_services: whether actors share inference services, otherwise each infers by itself.
    has_replay_node: whether the replay is a node, for several hosts, otherwise memory that the
      learner shares with the actors.
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
