"""The topologies of several nodes: one function each, which lists the nodes and their calls.

May import: programs, programs.components, programs.nodes.
"""

from __future__ import annotations

import functools

from programs.components.replay import ReverbReplay, SharedMemory
from programs.experiment import Experiment
from programs.graph import Graph, Handle
from programs.nodes.actor import ActorNode
from programs.nodes.base import Setup
from programs.nodes.coordinator import CoordinatorNode
from programs.nodes.evaluator import EvaluatorNode
from programs.nodes.inference import InferenceNode
from programs.nodes.learner import LearnerNode
from programs.nodes.replay import ReverbNode, TableNode


def heavy_env(setup: Setup) -> Graph:
    """For heavy environments: each actor infers by itself; the learner shares its memory."""
    graph = Graph("heavy_env")
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replay = SharedMemory(setup.experiment, setup.step)
    learner = graph.service("learner", LearnerNode, setup, replay, coordinator)
    _actors(graph, setup, replay, learner, [None], coordinator)
    graph.worker("evaluator", EvaluatorNode, setup, learner, coordinator, restartable=True)
    return graph


def light_env(setup: Setup) -> Graph:
    """For light environments: inference services act for many actors; replay is shared memory."""
    graph = Graph("light_env")
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replay = SharedMemory(setup.experiment, setup.step)
    learner = graph.service("learner", LearnerNode, setup, replay, coordinator)
    inferencers = _inferencers(graph, setup, learner, coordinator)
    _actors(graph, setup, replay, learner, inferencers, coordinator)
    graph.worker("evaluator", EvaluatorNode, setup, learner, coordinator, restartable=True)
    return graph


def distributed(setup: Setup) -> Graph:
    """For several hosts: replay is a service too; nodes share only their addresses."""
    graph = Graph("distributed")
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    if setup.experiment.replay.chosen_service == "table":
        replay = graph.service("replay", TableNode, setup, coordinator)
    else:
        client = functools.partial(ReverbReplay, setup.experiment, setup.step, setup.directory)
        replay = graph.server("replay", ReverbNode, setup, coordinator, client=client)
    learner = graph.service("learner", LearnerNode, setup, replay, coordinator)
    inferencers = _inferencers(graph, setup, learner, coordinator)
    _actors(graph, setup, replay, learner, inferencers, coordinator)
    graph.worker("evaluator", EvaluatorNode, setup, learner, coordinator, restartable=True)
    return graph


def _inferencers(
    graph: Graph, setup: Setup, learner: Handle, coordinator: Handle
) -> list[Handle | None]:
    """Adds the inference services."""
    return [
        graph.service(
            f"inferencer/{index}", InferenceNode, setup, index, learner, coordinator,
            restartable=True,
        )
        for index in range(setup.experiment.program.num_inferencers)
    ]  # fmt: skip


def _actors(
    graph: Graph,
    setup: Setup,
    replay: SharedMemory | Handle,
    learner: Handle,
    inferencers: list[Handle | None],
    coordinator: Handle,
) -> None:
    """Adds the actors, which take the inferencers in order; an actor with None infers by itself."""
    for rank in range(setup.experiment.program.num_actors):
        inferencer = inferencers[rank % len(inferencers)]
        graph.worker(
            f"actor/{rank}", ActorNode, setup, rank, replay, learner, inferencer, coordinator,
            restartable=True,
        )  # fmt: skip


_CPU_GROUPS = ("coordinator", "actor", "evaluator", "replay")
_TOPOLOGIES = {"heavy_env": heavy_env, "light_env": light_env, "distributed": distributed}


def graph_of(setup: Setup) -> Graph:
    """Returns the program of the setup's topology."""
    return _TOPOLOGIES[setup.experiment.topology](setup)


def environment(group: str, experiment: Experiment | None = None) -> dict[str, str]:
    """Returns the environment variables of the processes of a group of nodes.

    On a machine with an accelerator, the learner and the inference services use it, and actors too
    if the config names devices for them. JAX takes most of the memory of all devices that a process
    sees, so only a learner that shares none may do so.

    Args:
      group: of nodes.
      experiment: that runs; None where a process sees only the devices that are its own.
    """
    acting = () if experiment is None else experiment.inferencer.devices
    names_devices = experiment is not None and bool(acting or experiment.service.devices)
    acts_there = bool(acting) and experiment is not None and experiment.topology == "heavy_env"
    if group in _CPU_GROUPS and not (group == "actor" and acts_there):
        return {"JAX_PLATFORMS": "cpu"}
    shares = group != "learner" or names_devices
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if shares else {}
