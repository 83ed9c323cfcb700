"""The topology fused: one compiled loop of one policy."""

from __future__ import annotations

import contextlib
import functools

import jax
import numpy as np

from rlstack.jax_envs.factory import make_batch
from rlstack.learning.update import in_thread
from rlstack.programs.build.evaluation import compile_evaluation, make_evaluator
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.calls import Calls, Phase
from rlstack.programs.run.fused_run import FusedRun, begin, make_parts


class Fused(Calls, FusedRun):
    """The parts of an experiment whose loop is compiled, and the calls of it."""

    def __init__(self, experiment: Experiment, phase: Phase = contextlib.nullcontext) -> None:
        """Makes the parts.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the environment is not one in JAX, or the agent does not fit it.
        """
        env = make_batch(experiment.env.name, experiment.env.options)
        parts = make_parts(experiment, env)
        evaluator = make_evaluator(experiment, env.spec)
        super().__init__(experiment, parts, evaluator, lambda: parts.loop.log_names)
        # The loop, its start and the evaluation compile at the same time.
        shapes = jax.eval_shape(parts.agent.initial_params, self.keys.learner)
        params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        evaluating = in_thread(compile_evaluation, experiment, evaluator, params)
        self.compile(parts.loop, functools.partial(begin, parts), self.keys, phase)
        self.learner.take(self._state.learning)
        with phase("compiling the evaluation"):
            evaluating.result()
