"""The topology fused: calls of one compiled loop, and on the host what is due between two calls."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp

from programs.components.evaluation import make_evaluator
from programs.experiment import Experiment
from programs.run.fused_run import FusedRun, begin, make_parts
from programs.tracking.periodic import PeriodicActions
from rlstack.fused.loop import NO_LIMIT, Limits, LoopState, Report
from rlstack.jax_envs.factory import make_batch

_GROWTH = 8  # most times as many iterations as in the call before
# The start is computed only once, and optimizing its random draws takes XLA a second.
QUICKLY = {"xla_backend_optimization_level": 1}


class Pace:
    """Chooses the number of iterations of each call, so that calls take a given time.

    Attributes:
      iterations: of the next call.
    """

    def __init__(self, call_seconds: float) -> None:
        """Begins with one iteration."""
        self.iterations, self._wanted = 1, call_seconds

    def adapt(self, iterations: int, seconds: float) -> None:
        """Chooses by what a call took, without its compilation."""
        rate = iterations / max(seconds, 1e-6)
        self.iterations = max(1, min(math.ceil(rate * self._wanted), _GROWTH * self.iterations))


class Fused(FusedRun):
    """The parts of an experiment whose loop is compiled, and the calls of it."""

    def __init__(
        self,
        experiment: Experiment,
        phase: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Makes the parts.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the environment is not one in JAX, or the agent does not fit it.
        """
        env = make_batch(experiment.env.name, experiment.env.options)
        parts = make_parts(experiment, env)
        self._phase, self._loop = phase, parts.loop
        evaluator = make_evaluator(experiment, env.spec)
        super().__init__(experiment, parts, evaluator, lambda: parts.loop.log_names)
        self._pace = Pace(experiment.fused.call_seconds)
        start = jax.jit(functools.partial(begin, parts), compiler_options=QUICKLY)
        # Copies, because an array must not be donated twice, as params and as target params.
        self.state = jax.tree.map(jnp.array, start(self.keys))
        placed = parts.loop.shardings(self._state)
        # By default also the results go where the compiler wants them, and the next call compiles.
        self._run = jax.jit(parts.loop.run, donate_argnums=0, out_shardings=(placed, None))
        self.learner.take(self._state.learning)

    @property
    def state(self) -> LoopState:
        """The state of the loop."""
        return self._state

    @state.setter
    def state(self, state: LoopState) -> None:
        self._state = self._loop.placed(state)

    def restart_environments(self) -> None:
        """Starts new episodes, with the env keys of now."""
        self.state = jax.jit(self._loop.restart)(self._state, self.keys.env)

    def train(self, periodic: PeriodicActions, stop: Callable[[], bool]) -> None:
        """Acts and learns until a budget is spent, a rule says stop, or ``stop()`` is true.

        A call ends at the first iteration after which an evaluation or a checkpoint is due.

        Raises:
          NonFiniteError, EnvError: see `FusedRun.accept`.
        """
        experiment, learner = self.experiment, self.learner
        most = min(experiment.updates or NO_LIMIT, NO_LIMIT)
        compiling: AbstractContextManager = self._phase("compiling the loop")
        while not (periodic.ended_by(self.env_frames, learner.version) or stop()):
            due = min(experiment.frames, periodic.next_due) - self.env_frames
            frames = int(min(due, NO_LIMIT // 2))
            with compiling:
                report = self.call(Limits(self._pace.iterations, frames, most))
            if not isinstance(compiling, contextlib.nullcontext):
                compiling = contextlib.nullcontext()
            else:
                self._pace.adapt(int(report.iterations), self._seconds)
            self.log(periodic, report)
            periodic.tick(self.env_frames, self.stats)

    def call(self, limits: Limits) -> Report:
        """Runs the compiled program until one of the limits."""
        started = time.perf_counter()
        self._state, report = self._run(self._state, limits)
        report = jax.block_until_ready(report)
        self.accept(self._state.learning, report, time.perf_counter() - started)
        return report

    def close(self) -> None:
        """Does nothing: there are no processes and no files."""
