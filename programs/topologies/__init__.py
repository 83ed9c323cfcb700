"""The topologies of several nodes: one function each, which lists the nodes and their calls.

May import: rlstack.programs, rlstack.programs.components, rlstack.programs.nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlstack.programs.components.replay import SharedMemory
from rlstack.programs.experiment import Experiment
from rlstack.programs.graph import Graph, Handle
from rlstack.programs.nodes.actor import ActorNode
from rlstack.programs.nodes.base import Setup
from rlstack.programs.nodes.coordinator import CoordinatorNode
from rlstack.programs.nodes.evaluator import EvaluatorNode
from rlstack.programs.nodes.group import shares
from rlstack.programs.nodes.group.learner import GroupLearnerNode
from rlstack.programs.nodes.learner import LearnerNode
from rlstack.programs.topologies.services import inference_services, replay_service
from rlstack.programs.topologies.several import several


def heavy_env(setup: Setup) -> Graph:
    """For heavy environments: each actor infers by itself; the learner shares its memory."""
    graph = Graph("heavy_env")
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replays = [SharedMemory(share.experiment, share.step) for share in shares.all_of(setup)]
    learners = _learners(graph, setup, replays, coordinator)
    _actors(graph, setup, replays, learners, [None], coordinator)
    graph.worker("evaluator", EvaluatorNode, setup, learners[0], coordinator, restartable=True)
    return graph


def light_env(setup: Setup) -> Graph:
    """For light environments: inference services act for many actors; replay is shared memory."""
    graph = Graph("light_env")
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replays = [SharedMemory(share.experiment, share.step) for share in shares.all_of(setup)]
    learners = _learners(graph, setup, replays, coordinator)
    services = inference_services(graph, setup, learners, coordinator)
    _actors(graph, setup, replays, learners, services, coordinator)
    graph.worker("evaluator", EvaluatorNode, setup, learners[0], coordinator, restartable=True)
    return graph


def distributed(setup: Setup) -> Graph:
    """For several hosts: replay is a service too; nodes share only their addresses."""
    graph = Graph("distributed")
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replays = [replay_service(graph, share, coordinator) for share in shares.all_of(setup)]
    learners = _learners(graph, setup, replays, coordinator)
    services = inference_services(graph, setup, learners, coordinator)
    _actors(graph, setup, replays, learners, services, coordinator)
    graph.worker("evaluator", EvaluatorNode, setup, learners[0], coordinator, restartable=True)
    return graph


_Replays = Sequence[SharedMemory | Handle]  # one for each learner process


def _learners(
    graph: Graph, setup: Setup, replays: _Replays, coordinator: Handle
) -> Sequence[Handle]:
    """Adds the learner, or the learner processes."""
    if len(replays) == 1:
        return [graph.service("learner", LearnerNode, setup, replays[0], coordinator)]
    return [
        graph.service(f"learner/{index}", GroupLearnerNode, setup, index, replay, coordinator)
        for index, replay in enumerate(replays)
    ]


def _actors(
    graph: Graph,
    setup: Setup,
    replays: _Replays,
    learners: Sequence[Handle],
    services: Sequence[Handle | None],
    coordinator: Handle,
) -> None:
    """Adds the actors, which take the learners and the services in order.

    An actor whose service is None infers by itself.
    """
    for rank in range(setup.experiment.program.num_actors):
        learner, replay = learners[rank % len(learners)], replays[rank % len(replays)]
        service = services[rank % len(services)]
        graph.worker(
            f"actor/{rank}", ActorNode, setup, rank, replay, learner, service, coordinator,
            restartable=True,
        )  # fmt: skip


_CPU_GROUPS = ("coordinator", "actor", "evaluator", "replay")
_TOPOLOGIES = {"heavy_env": heavy_env, "light_env": light_env, "distributed": distributed}


def graph_of(setup: Setup) -> Graph:
    """Returns the program of the setup's topology."""
    if setup.experiment.policies:
        return several(setup)
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
    others = group != "learner" or names_devices or bool(experiment and experiment.policies)
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if others else {}
