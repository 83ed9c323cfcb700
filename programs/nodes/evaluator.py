"""The evaluator's node: judges the newest params when the coordinator says so."""

from __future__ import annotations

import threading
from typing import Any

from programs.build.components import make_evaluator
from programs.build.environments import make_evaluation_env
from programs.nodes.coordination import JUDGING, OVER
from programs.nodes.line import Line, Setup
from programs.nodes.params import know_records
from rlstack.rpc import codec


class EvaluatorNode:
    """Plays whole episodes with the greedy policy, in environments of its own.

    Attributes:
      niceness: as a process it takes what processors the others leave, also while all start.
    """

    niceness = 10

    def __init__(self, setup: Setup, learner: Any, coordinator: Any, stop: threading.Event) -> None:
        """Prepares to judge; the environments are made for each evaluation."""
        setup.configure_jax(single_thread=True)
        self._setup, self._learner, self._coordinator = setup, learner, coordinator
        self._stop = stop
        self._line = Line(coordinator, "evaluator", stop)
        self._evaluator = make_evaluator(setup.experiment, setup.spec)
        know_records(self._evaluator.agent, setup.step)

    def run(self) -> None:
        """Judges when told to, the last time at the program's end."""
        done = 0
        while (orders := self._line.ask()).phase != OVER:
            if orders.phase == JUDGING:
                self._judge(orders.env_frames, last=True)
                self._line.end()
                return  # what was heard before would have it judge again, and the learner leaves
            if orders.evaluations > done:
                done = orders.evaluations
                self._judge(orders.env_frames, last=False)
            self._stop.wait(0.1)

    def _judge(self, env_frames: int, *, last: bool) -> None:
        _, encoded = self._learner.get_params(-1)
        with make_evaluation_env(self._setup.experiment) as env:
            found = self._evaluator.evaluate(codec.decode(encoded), env)
        self._coordinator.judged(env_frames, found.returns, found.lengths, last, found.opponents)
