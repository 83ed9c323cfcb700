"""Adds a topology's nodes to a Launchpad program, each kind in one way."""

from __future__ import annotations

from typing import Any

import launchpad as lp

from programs.launchers.launchpad import ReplayNode, ServiceNode, WorkerNode
from programs.nodes.actor import ActorNode
from programs.nodes.coordinator import CoordinatorNode
from programs.nodes.evaluator import EvaluatorNode
from programs.nodes.inference import InferenceNode
from programs.nodes.learner import LearnerNode
from programs.nodes.line import Setup

Handle = Any  # becomes a client in the node that is given it


class Wiring:
    """A program under construction; it has a coordinator from the start.

    Attributes:
      program: the Launchpad program.
      coordinator: the handle of its coordinator.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        """Begins a program."""
        self.program, self._setup = lp.Program(name), setup
        self.coordinator: Handle = None
        self.coordinator = self._service(CoordinatorNode, "coordinator")
        program = setup.experiment.program
        self.ranks = range(program.num_actors)
        self._num_inferencers = program.num_inferencers

    def reverb(self) -> Handle:
        """Adds the replay service."""
        return self._add(ReplayNode(self._setup, self.coordinator), "replay")

    def learner(self, replay: Any) -> Handle:
        """Adds the learner, which reads from the replay."""
        return self._service(LearnerNode, "learner", replay)

    def inferencers(self, learner: Handle) -> list[Handle]:
        """Adds the inference services, which act with the learner's params."""
        return [
            self._service(InferenceNode, "inferencer", index, learner, index=index)
            for index in range(self._num_inferencers)
        ]

    def actor(self, rank: int, replay: Any, learner: Handle, inferencer: Handle | None) -> None:
        """Adds an actor; without an inferencer it acts for itself."""
        node = WorkerNode(
            ActorNode, self._setup, rank, replay, learner, inferencer, self.coordinator,
            name=f"actor/{rank}", restartable=True,
        )  # fmt: skip
        self._add(node, "actor")

    def evaluator(self, learner: Handle) -> None:
        """Adds the evaluator of the learner's params."""
        node = WorkerNode(
            EvaluatorNode, self._setup, learner, self.coordinator,
            name="evaluator", restartable=True,
        )  # fmt: skip
        self._add(node, "evaluator")

    def _service(self, cls: type, group: str, *args: Any, index: int | None = None) -> Handle:
        if self.coordinator is not None:
            args = (*args, self.coordinator)
        # Of these only inference services come in numbers, and only they hold nothing to lose.
        name = group if index is None else f"{group}/{index}"
        may_move = index is not None and self._setup.experiment.program.launch == "ray"
        node = ServiceNode(
            cls, self._setup, *args, name=name, restartable=index is not None,
            book=self.coordinator if may_move else None,
        )  # fmt: skip
        return self._add(node, group)

    def _add(self, node: Any, group: str) -> Handle:
        with self.program.group(group):
            return self.program.add_node(node)
