"""The nodes of a program and their calls, as its topology divides it.

The topologies are rows of `rlstack.programs.config.layouts.LAYOUTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from rlstack.programs.build.devices import num_services
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.program.actor import ActorNode
from rlstack.programs.program.base import LEARNER, Setup
from rlstack.programs.program.coordinator import CoordinatorNode
from rlstack.programs.program.data_parallel import shards
from rlstack.programs.program.data_parallel.learner import GroupLearnerNode
from rlstack.programs.program.evaluator import EvaluatorNode
from rlstack.programs.program.graph import Graph, Handle
from rlstack.programs.program.inference import InferenceNode
from rlstack.programs.program.learner import LearnerNode
from rlstack.programs.program.multi_policy.joint_learner import JointLearnerNode
from rlstack.programs.program.multi_policy.learner import FollowingLearnerNode, LeadingLearnerNode
from rlstack.programs.program.replay import ReverbNode, TableNode, saved_replays
from rlstack.programs.program.replay_sides import ReverbReplay, SharedMemory


def graph_of(setup: Setup) -> Graph:
    """Returns the program of the setup's topology.

    Every policy that learns has a learner, a replay and, by the topology, inference services. The
    learner of the only policy may have several processes, each with a replay of its own. An actor
    steps one pool of environments and acts in it with all policies.
    """
    experiment, graph = setup.experiment, Graph(setup.experiment.topology)
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replays: dict[str, Sequence[SharedMemory | Handle]] = {
        own.policy: [replay_of(graph, share, coordinator) for share in shards.all_of(own)]
        for own in setup.learning
    }
    if experiment.policies:
        learners = _learners_of_policies(graph, setup, replays, coordinator)
    else:
        learners = {"": _learner_processes(graph, setup, replays[""], coordinator)}
    services = {
        own.policy: inference_services(graph, own, learners[own.policy], coordinator)
        for own in setup.learning
        if num_services(experiment)
    }
    for rank in range(experiment.program.num_actors):
        its = [
            {name: found[rank % len(found)] for name, found in handles.items()}
            for handles in (replays, learners, services)
        ]
        graph.worker(f"actor/{rank}", ActorNode, setup, rank, *its, coordinator, restartable=True)
    first = {name: found[0] for name, found in learners.items()}
    graph.worker("evaluator", EvaluatorNode, setup, first, coordinator, restartable=True)
    return graph


def _learner_processes(
    graph: Graph, setup: Setup, replays: Sequence[SharedMemory | Handle], coordinator: Handle
) -> Sequence[Handle]:
    """Adds the learner, or the learner processes."""
    kind = LearnerNode
    if setup.experiment.data:
        from rlstack.programs.program.offline_first import OfflineFirstLearnerNode

        kind = OfflineFirstLearnerNode
    if len(replays) == 1:
        return [graph.service("learner", kind, setup, replays[0], coordinator)]
    return [
        graph.service(f"learner/{index}", GroupLearnerNode, setup, index, replay, coordinator)
        for index, replay in enumerate(replays)
    ]


_CPU_GROUPS = ("coordinator", "actor", "evaluator", "replay")


def environment(group: str, experiment: Experiment | None = None) -> dict[str, str]:
    """Returns the environment variables of the processes of a group of nodes.

    On a machine with an accelerator, the learner and the inference services use it; actors use it
    if the config names devices for them. By default JAX reserves most of the memory of all devices
    that a process sees. Only a learner that shares no device keeps this default.

    Args:
      group: name of the group of nodes.
      experiment: the program's experiment; None if each process sees only its own devices.
    """
    acting = () if experiment is None else experiment.inferencer.devices
    names_devices = experiment is not None and bool(acting or experiment.service.devices)
    acts_there = bool(acting) and experiment is not None and not experiment.layout.has_services
    if group in _CPU_GROUPS and not (group == "actor" and acts_there):
        return {"JAX_PLATFORMS": "cpu"}
    others = group != "learner" or names_devices or bool(experiment and experiment.policies)
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if others else {}


def _learners_of_policies(
    graph: Graph,
    setup: Setup,
    replays: Mapping[str, Sequence[SharedMemory | Handle]],
    coordinator: Handle,
) -> dict[str, Sequence[Handle]]:
    """Adds the learners of all policies; that of the first one writes the checkpoints of all."""
    restarts = setup.learner_restarts
    its = {name: found[0] for name, found in replays.items()}
    if setup.experiment.program.trainers == "one":
        together = graph.service(
            LEARNER, JointLearnerNode, setup, its, coordinator, restartable=restarts
        )
        return {name: [together] for name in its}
    first, *others = setup.learning
    following = {
        own.policy: graph.service(
            own.node(LEARNER),
            FollowingLearnerNode,
            own,
            its[own.policy],
            coordinator,
            restartable=restarts,
        )
        for own in others
    }
    leading = graph.service(
        first.node(LEARNER),
        LeadingLearnerNode,
        first,
        its[first.policy],
        coordinator,
        following,
        restartable=restarts,
    )
    return {name: [node] for name, node in {first.policy: leading, **following}.items()}


def replay_of(graph: Graph, setup: Setup, coordinator: Handle) -> SharedMemory | Handle:
    """Returns the replay in shared memory, or adds the node that holds it."""
    if not setup.experiment.layout.has_replay_node:
        return SharedMemory(setup.experiment, setup.step)
    name = shards.name_of(setup, "replay")
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
        for index in range(num_services(setup.experiment))
    ]  # fmt: skip
