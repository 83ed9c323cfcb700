"""The node that evaluates each policy that learns, in games with the other policies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from rlstack.acting.evaluator import Evaluation
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.policies.evaluation import SetEvaluator
from rlstack.programs.build.policies.members import divide
from rlstack.programs.program.base import OVER, Setup
from rlstack.programs.program.evaluator import EvaluatorNode, newest_params
from rlstack.programs.program.multi_policy.clients import learner_of
from rlstack.programs.program.multi_policy.versions import CopiedVersions, copied_versions
from rlstack.rpc import RemoteObject, UnavailableError
from rlstack.types import Params


class SeveralEvaluatorNode(EvaluatorNode):
    """An `EvaluatorNode` of several policies; their params are a dict by policy."""

    def __init__(
        self,
        setup: Setup,
        learners: Mapping[str, RemoteObject],
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Makes the evaluators; arguments as for `EvaluatorNode`, with each policy's learner."""
        self._learners = learners  # or clients of the nodes in which they are
        self._versions: dict[str, CopiedVersions] = {}  # earlier ones, by who plays them
        super().__init__(setup, next(iter(learners.values())), coordinator, stop)

    def _make_evaluator(self) -> Callable[..., Evaluation]:
        setup = self._setup
        for own in setup.learning:
            own.register_records(make_agent(own.experiment, own.spec))
        division = divide(setup.experiment)
        for name, member in division.members.items():
            if member.kind == "history":
                self._versions[name] = copied_versions(setup, member, self._learners)
        return SetEvaluator(setup.experiment, division, setup.spec, self._versions).evaluate

    def _newest_params(self) -> Params:
        while True:
            try:
                return self._ask_for_params()
            except UnavailableError:
                # A learner that is lost comes back, or the program ends.
                if not self._setup.learner_restarts or self._program.poll().phase == OVER:
                    raise

    def _ask_for_params(self) -> Params:
        for versions in self._versions.values():
            versions.exchange()
        return {
            own.policy: newest_params(learner_of(own, self._learners[own.policy]))
            for own in self._setup.learning
        }
