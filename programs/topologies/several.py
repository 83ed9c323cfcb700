"""The program of several policies: what one policy has, each of those that learn has."""

from __future__ import annotations

from rlstack.programs.components.replay import SharedMemory
from rlstack.programs.graph import Graph, Handle
from rlstack.programs.nodes.base import LEARNER, Setup
from rlstack.programs.nodes.coordinator import CoordinatorNode
from rlstack.programs.nodes.several.actor import SeveralActorNode
from rlstack.programs.nodes.several.evaluator import SeveralEvaluatorNode
from rlstack.programs.nodes.several.learner import FollowingLearnerNode, LeadingLearnerNode
from rlstack.programs.nodes.several.together import TogetherLearnerNode
from rlstack.programs.topologies.services import inference_services, replay_service


def several(setup: Setup) -> Graph:
    """For several policies, in each topology.

    Every policy that learns has a learner, a replay and, except in heavy_env, inference services.
    An actor steps whole games and acts in them with all policies.
    """
    experiment, learning = setup.experiment, setup.learning
    graph = Graph(experiment.topology)
    coordinator = graph.service("coordinator", CoordinatorNode, setup)
    replays: dict[str, SharedMemory | Handle] = {
        own.policy: replay_service(graph, own, coordinator)
        if experiment.topology == "distributed"
        else SharedMemory(own.experiment, own.step)
        for own in learning
    }
    learners = _learners(graph, setup, replays, coordinator)
    services = {
        own.policy: inference_services(graph, own, [learners[own.policy]], coordinator)
        for own in learning
        if experiment.topology != "heavy_env"
    }
    for rank in range(experiment.program.num_actors):
        its = {name: found[rank % len(found)] for name, found in services.items()}
        graph.worker(
            f"actor/{rank}", SeveralActorNode, setup, rank, replays, learners, its, coordinator,
            restartable=True,
        )  # fmt: skip
    graph.worker("evaluator", SeveralEvaluatorNode, setup, learners, coordinator, restartable=True)
    return graph


def _learners(
    graph: Graph,
    setup: Setup,
    replays: dict[str, SharedMemory | Handle],
    coordinator: Handle,
) -> dict[str, Handle]:
    """Adds the learners of all policies; that of the first one writes the checkpoints of all."""
    restarts = setup.learner_restarts
    if setup.experiment.program.trainers == "one":
        together = graph.service(
            LEARNER, TogetherLearnerNode, setup, replays, coordinator, restartable=restarts
        )
        return dict.fromkeys(replays, together)
    first, *others = setup.learning
    following = {
        own.policy: graph.service(
            own.node(LEARNER),
            FollowingLearnerNode,
            own,
            replays[own.policy],
            coordinator,
            restartable=restarts,
        )
        for own in others
    }
    leading = graph.service(
        first.node(LEARNER),
        LeadingLearnerNode,
        first,
        replays[first.policy],
        coordinator,
        following,
        restartable=restarts,
    )
    return {first.policy: leading, **following}
