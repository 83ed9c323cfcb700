"""The evaluator's node: evaluates the newest params when the coordinator says so."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping

from rlstack.acting.evaluator import Evaluation
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.best import BestCheckpoint
from rlstack.programs.build.evaluation import Allowance, Shows, evaluate, make_evaluator
from rlstack.programs.build.policies.evaluation import SetEvaluator
from rlstack.programs.build.policies.members import divide
from rlstack.programs.pictures.training_videos import TrainingVideos
from rlstack.programs.program.base import EVALUATING, OVER, RUNNING, CoordinatorClient, Setup
from rlstack.programs.program.multi_policy.clients import learner_of
from rlstack.programs.program.multi_policy.versions import CopiedVersions, copied_versions
from rlstack.programs.session import timing
from rlstack.rpc import RemoteObject, UnavailableError, codec
from rlstack.types import Params

# The largest share of a core for automatic evaluations. The other nodes may need all cores.
_SHARE = 0.05


class EvaluatorNode:
    """Plays whole episodes with the greedy policy, in environments of its own.

    Each of several policies plays with the others, all greedy; params are then a dict by policy.

    Attributes:
      niceness: niceness of the node's process, which should use only idle processor time.
    """

    niceness = 10

    def __init__(
        self,
        setup: Setup,
        learners: Mapping[str, RemoteObject],
        coordinator: RemoteObject,
        stop: threading.Event,
    ) -> None:
        """Makes the evaluator; environments are made for each evaluation.

        Args:
          setup: the program's setup.
          learners: a client of each policy's learner, which publishes params; see `ActorNode`.
          coordinator: a client of the coordinator, which receives the results.
          stop: set by the launcher to end this node.
        """
        setup.configure_jax(single_thread=True)
        self._setup, self._learners, self._coordinator = setup, learners, coordinator
        self._versions: dict[str, CopiedVersions] = {}  # earlier ones, by who plays them
        self._stop = stop
        self._program = CoordinatorClient(coordinator, "evaluator", stop)
        self._evaluate_params = self._make_evaluator()
        self._best = BestCheckpoint(setup.directory)
        self._videos = TrainingVideos(setup.experiment, setup.directory, self._program.note)
        # Processor time, because this node gets little of it while others are busy. If the other
        # nodes are threads, the time of this thread alone.
        in_threads = setup.experiment.program.launch == "threads"
        clock = time.thread_time if in_threads else time.process_time
        self._allowance = Allowance(_SHARE, clock=clock, starts_once=True)

    def _make_evaluator(self) -> Callable[..., Evaluation]:
        setup = self._setup
        if not setup.experiment.policies:
            evaluator = make_evaluator(setup.experiment, setup.spec)
            setup.register_records(evaluator.agent)
            return functools.partial(evaluate, setup.experiment, evaluator)
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
        params = {
            own.policy: newest_params(learner_of(own, self._learners[own.policy]))
            for own in self._setup.learning
        }
        return params if self._setup.experiment.policies else params[""]

    def run(self) -> None:
        """Evaluates when an evaluation is due, and once more at the end of training."""
        done = 0
        while (state := self._program.poll()).phase != OVER:
            if state.phase == EVALUATING:
                self._evaluate(state.env_frames, last=True)
                self._program.report_end()
                return  # the next state may still say EVALUATING, and the learner is ending
            if state.evaluations > done:
                done = state.evaluations
                self._evaluate(state.env_frames, last=False)
            self._stop.wait(timing.PHASE_POLL)

    def _evaluate(self, env_frames: int, *, last: bool) -> None:
        params = self._newest_params()
        is_brief = not last and self._setup.experiment.evaluator.period == "auto"
        found = self._evaluate_briefly(params) if is_brief else self._evaluate_params(params)
        if found is None:
            return
        self._best.offer(env_frames, params, found)
        # Before the report, because the program ends after that of the last evaluation.
        video = self._videos.evaluated(env_frames, params)
        if video is not None:
            self._coordinator.video_written(env_frames, str(video))
        self._coordinator.evaluated(
            env_frames,
            found.returns,
            found.lengths,
            last,
            found.opponents,
            found.cut,
            dict(found.metrics),
            *((found.policies,) if found.policies else ()),
        )

    def _evaluate_briefly(self, params: Params) -> Evaluation | None:
        """Evaluates if the time budget allows it; stops when training ends, which does not wait."""

        def evaluation(progress: Shows) -> Evaluation:
            return self._evaluate_params(params, progress, brief=True)

        return self._allowance.evaluate(
            evaluation, lambda *_: self._program.poll().phase == RUNNING
        )


def newest_params(learner: RemoteObject) -> Params:
    """Returns the newest params of a learner."""
    _, encoded = learner.get_params(-1)
    return codec.decode(encoded)
