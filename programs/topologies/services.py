"""The services of one policy: its replay, and those that act for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rlstack.programs.components.replay import ReverbReplay
from rlstack.programs.graph import Graph, Handle
from rlstack.programs.nodes.base import Setup
from rlstack.programs.nodes.group import shares
from rlstack.programs.nodes.inference import InferenceNode
from rlstack.programs.nodes.replay import ReverbNode, TableNode, saved_replays


def replay_service(graph: Graph, setup: Setup, coordinator: Handle) -> Handle:
    """Adds the node that holds the replay."""
    name = shares.name_of(setup, "replay")
    if setup.experiment.replay.chosen_service == "table":
        return graph.service(name, TableNode, setup, coordinator)
    saved = saved_replays(setup)
    client = functools.partial(ReverbReplay, setup.experiment, setup.step, saved)
    return graph.server(name, ReverbNode, setup, coordinator, client=client)


def inference_services(
    graph: Graph, setup: Setup, learners: Sequence[Handle], coordinator: Handle
) -> list[Handle]:
    """Adds the inference services, which take the learners in order."""
    name = setup.node("inferencer")
    return [
        graph.service(
            f"{name}/{index}", InferenceNode, setup, index, learners[index % len(learners)],
            coordinator, restartable=True,
        )
        for index in range(setup.experiment.program.num_inferencers)
    ]  # fmt: skip
