"""Makes the evaluator of an experiment, and evaluates params in new environments.

`Allowance` bounds the time of automatic evaluations, those of ``evaluator.period`` auto.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from rlstack.acting.evaluator import Evaluation, Evaluator, Row, joined
from rlstack.agent import Agent
from rlstack.checks import WrongKindError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import Pool, fault_error, make_evaluation_env
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.references import Hook, check_callable, load_hook, name_of
from rlstack.types import EnvSpec, Params, PRNGKey

if TYPE_CHECKING:  # imported for environments in JAX
    from rlstack.fused.acting import Played
    from rlstack.jax_envs.environment import BatchedEnv

Found = TypeVar("Found")
Shows = Callable[[int, int], None]  # the number of episodes that ended, and of all

_FIELD = "Experiment: evaluator.factory"
_EXTRA = 0.3  # seconds that all evaluations of a short run may take: nobody notices them
_MOST_STEPS = 128  # maximum number of steps in a call of a compiled evaluation
_CALL_SECONDS = 0.05  # about the longest time of such a call, so that an evaluation can be given up
_WANTED = "(cfg, agent, rng_key) -> Evaluator of rlstack"


def check_evaluator(factory: Hook) -> None:
    """Checks the factory of a user's evaluator.

    Raises:
      ValueError: the factory cannot be imported.
      WrongKindError: the factory does not take the arguments of `Evaluator`.
    """
    rule = f"{_FIELD} {name_of(factory)} must be a function {_WANTED}"
    check_callable(rule, load_hook(_FIELD, factory), None, None, None)


def make_evaluator(experiment: Experiment, spec: EnvSpec) -> Evaluator:
    """Makes the evaluator, with the policy that evaluations have.

    Raises:
      WrongKindError: the user's factory made no evaluator.
    """
    agent = make_agent(experiment, spec, evaluating=True)
    cfg = experiment.evaluator
    if cfg.by_index:  # each pool plays one episode in each environment
        cfg = dataclasses.replace(cfg, episodes=cfg.num_envs)
    rng_key = role_key(experiment.seed, "evaluator")
    if cfg.factory:
        return _own(cfg, agent, rng_key)
    if experiment.evaluation_env.type == "jax":
        return CompiledEvaluator(cfg, agent, rng_key, experiment.evaluation_env)
    return Evaluator(cfg, agent, rng_key)


def _own(cfg: EvaluatorConfig, agent: Agent, rng_key: PRNGKey) -> Any:
    rule = f"{_FIELD} {name_of(cfg.factory)} must be a function {_WANTED}"
    evaluator = load_hook(_FIELD, cfg.factory)(cfg, agent, rng_key)
    evaluate = getattr(evaluator, "evaluate", None)
    check_callable(f"{rule}, with evaluate(params, env, progress)", evaluate, None, None, None)
    if not hasattr(evaluator, "agent"):
        evaluator.agent = agent
    return evaluator


def evaluate(
    experiment: Experiment,
    evaluator: Evaluator,
    params: Params,
    progress: Shows | None = None,
    env: Pool | None = None,
    make_pool: Callable[[int], Pool] | None = None,
    brief: bool = False,
) -> Evaluation:
    """Evaluates params in environments of the experiment's evaluation.

    Args:
      experiment: sets the number of episodes, and whether they are chosen by index.
      evaluator: the result of `make_evaluator`.
      params: the params to evaluate.
      progress: called after each step with the number of finished episodes and of all episodes.
      env: the first environments, if they exist already; the caller closes them.
      make_pool: makes environments, given the number of the first one; by default makes the
        environments of the experiment's evaluation.
      brief: True to play only one episode in each environment. A user's evaluator that is not a
        subclass of `Evaluator` ignores it.

    Raises:
      WrongKindError: a user's evaluator did not return an `Evaluation`.
    """
    cfg = experiment.evaluator
    if brief:
        cfg = dataclasses.replace(cfg, episodes=cfg.num_envs)
        evaluator = evaluator.brief() if isinstance(evaluator, Evaluator) else evaluator
    parts = []
    for first in range(0, cfg.episodes, cfg.num_envs if cfg.by_index else cfg.episodes):

        def show(ended: int, total: int, first: int = first) -> None:
            if progress is not None:
                progress(first + ended, cfg.episodes if cfg.by_index else total)

        with contextlib.ExitStack() as stack:
            pool: Any = env
            if first or pool is None:
                made = (
                    make_pool(first) if make_pool else make_evaluation_env(experiment, first=first)
                )
                pool = stack.enter_context(made)
            found = evaluator.evaluate(params, pool, show)
        if not isinstance(found, Evaluation):
            raise WrongKindError(
                f"{_FIELD} {name_of(cfg.factory)} must make an evaluator that returns an "
                f"Evaluation of rlstack.acting.evaluator; got {type(found).__name__}."
            )
        parts.append(found)
    return parts[0] if len(parts) == 1 else joined(parts)


def compile_evaluation(experiment: Experiment, evaluator: Evaluator, params: Params) -> None:
    """Compiles the functions of later evaluations by running the first step of one.

    Args:
      experiment: see `evaluate`. With a user's evaluator this function does nothing.
      evaluator: the result of `make_evaluator`.
      params: params of the agent, with any values.
    """
    if experiment.evaluator.factory:
        return
    calls = itertools.count()

    def stop(*_: int) -> None:
        if next(calls):  # the first call is before the first step
            raise _GivenUpError

    with contextlib.suppress(_GivenUpError):
        evaluate(experiment, evaluator, params, stop, brief=True)


class CompiledEvaluator(Evaluator):
    """Plays in environments written in JAX: a call of one compiled function makes many steps.

    With opponents it plays as `Evaluator` does.
    """

    def __init__(
        self, cfg: EvaluatorConfig, agent: Agent, rng_key: PRNGKey, env_cfg: EnvConfig
    ) -> None:
        """Prepares to evaluate; see `Evaluator`.

        Args:
          cfg: the number of episodes and of environments.
          agent: built with the policy of evaluation.
          rng_key: the acting key.
          env_cfg: says whether rewards and observations must be finite.
        """
        super().__init__(cfg, agent, rng_key)
        self._env_cfg = env_cfg
        # By the environments; copies of the evaluator share them.
        self._functions: dict[BatchedEnv, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def _play(self, params: Params, env: Any) -> Generator[Row, bool, None]:
        if getattr(env, "functions", None) is None:
            yield from super()._play(params, env)
            return
        batch, env_keys = env.functions
        if batch not in self._functions:
            self._functions[batch] = self._compiled(batch)
        begin, play = self._functions[batch]
        acting, played = begin(env_keys, self._fresh["rng_key"])
        made = steps = 1
        while True:
            if (yield from self._rows(played, made)):
                acting, played = begin(acting.env.rng_key, acting.rng_key)
                made = 1
                continue
            began, made = time.monotonic(), steps
            acting, played = jax.block_until_ready(play(params, acting, steps))
            if time.monotonic() - began < _CALL_SECONDS:
                steps = min(2 * steps, _MOST_STEPS)
            else:
                steps = max(1, steps // 2)

    def _compiled(self, batch: BatchedEnv) -> tuple[Callable[..., Any], Callable[..., Any]]:
        finite = self._env_cfg.check_finite
        from rlstack.fused.acting import Actors

        actors = Actors(self.agent, batch, self._num_envs, check_finite=finite)
        play = functools.partial(actors.play, most=_MOST_STEPS)
        return CompiledQuickly(actors.begin), jax.jit(play, donate_argnums=1)

    def _rows(self, played: Played, made: int) -> Generator[Row, bool, bool]:
        """Yields the steps that were made; returns whether new episodes must be started."""
        step_type, reward, bad, metrics = jax.tree.map(np.asarray, played)

        def ended(step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
            return {name: x[step, rows].astype(float) for name, x in metrics.items()}

        for i in range(made):  # the evaluation may not need all of them
            if bad[i].any():
                raise fault_error(self._env_cfg.name, bad[i])
            if (yield Row(step_type[i], reward[i], functools.partial(ended, i))):
                return True
        return False


class Allowance:
    """The time budget of automatic evaluations.

    The budget is a share of the time since its creation, plus 0.3 s; more where more threads want
    to run than there are cores, because everything takes longer there. An evaluation does not start
    if the previous one took longer than the time that is left, and it is aborted if it exceeds this
    time. So all evaluations stay within the budget, however slow environments and networks are.

    The compilation in the first evaluation does not count, because the last evaluation, at the end
    of the run, uses the same compiled functions.
    """

    def __init__(
        self,
        share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        expected: float = 0.0,
        starts_once: bool = False,
    ) -> None:
        """Starts measuring the time of which evaluations may use a share.

        Args:
          share: the share of the elapsed time that evaluations may use, such as 0.02.
          clock: measures the seconds that evaluations take: wall time, or a processor's time.
          expected: minimum seconds that the first evaluation takes.
          starts_once: True to exclude the time before the first step of the first evaluation, in
            which the environments are compiled or their packages imported.
        """
        self._share, self._clock, self._starts_once = share, clock, starts_once
        self._began = time.monotonic()
        self._spent = 0.0
        self._expected = expected  # seconds of the next evaluation
        self._compiles = True

    @property
    def left(self) -> float:
        """The seconds that evaluations may take now."""
        extra = _EXTRA * max(1.0, _load())
        return extra + self._share * (time.monotonic() - self._began) - self._spent

    def evaluate(
        self, evaluation: Callable[[Shows], Found], may_go_on: Callable[[int, int], bool]
    ) -> Found | None:
        """Makes an evaluation.

        Args:
          evaluation: makes the evaluation. Its argument is a function to call after each step of
            the environments, with the number of finished episodes and of all episodes.
          may_go_on: called with these numbers; returns False to abort the evaluation.

        Returns:
          The result of `evaluation`; None if it did not start, or was aborted.
        """
        left = self.left
        if self._expected > left:
            return None
        started, steps, before = self._clock(), 0, 0.0

        def check(ended: int, total: int) -> None:
            nonlocal started, steps, before
            now, steps = self._clock(), steps + 1
            if self._compiles and steps == 1 and self._starts_once:
                started = now
            elif self._compiles and steps == 2:
                started += now - before  # the first step was compiled
                self._compiles = False
            before = now
            if now - started > left or not may_go_on(ended, total):
                raise _GivenUpError

        found = None
        with contextlib.suppress(_GivenUpError):
            found = evaluation(check)
        taken = self._clock() - started
        self._spent += taken
        self._expected = taken if found is not None else 2 * taken
        return found


def _load() -> float:
    """Returns the machine's load average per core."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return 0.0


class _GivenUpError(Exception):
    """An evaluation takes too long, or is no longer of use."""
