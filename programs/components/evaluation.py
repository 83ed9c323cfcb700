"""Makes the evaluator of an experiment, and evaluates params in new environments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from programs.components.agent import make_agent
from programs.components.environments import Pool, make_evaluation_env
from programs.components.seeds import role_key
from programs.experiment import Experiment
from rlstack.acting.evaluator import Evaluation, Evaluator, EvaluatorConfig, joined
from rlstack.agent import Agent
from rlstack.checks import WrongKindError
from rlstack.references import Hook, check_callable, load_hook, name_of
from rlstack.types import EnvSpec, Params, PRNGKey

_FIELD = "Experiment: evaluator.factory"
_WANTED = "(cfg, agent, rng_key) -> Evaluator of rlstack"


def check_evaluator(factory: Hook) -> None:
    """Checks the factory of an evaluator of the user's own.

    Raises:
      ValueError: it cannot be imported.
      WrongKindError: it does not take the arguments of `Evaluator`.
    """
    rule = f"{_FIELD} {name_of(factory)} must be a function {_WANTED}"
    check_callable(rule, load_hook(_FIELD, factory), None, None, None)


def make_evaluator(experiment: Experiment, spec: EnvSpec) -> Evaluator:
    """Makes the evaluator, with the agent's greedy policy.

    Raises:
      WrongKindError: the user's factory made no evaluator.
    """
    agent = make_agent(experiment, spec, greedy=True)
    cfg = experiment.evaluator
    if cfg.by_index:  # each pool plays one episode in each environment
        cfg = dataclasses.replace(cfg, episodes=cfg.num_envs)
    rng_key = role_key(experiment.seed, "evaluator")
    if not cfg.factory:
        return Evaluator(cfg, agent, rng_key)
    return _own(cfg, agent, rng_key)


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
    progress: Callable[[int, int], None] | None = None,
    env: Pool | None = None,
    make_pool: Callable[[int], Pool] | None = None,
) -> Evaluation:
    """Evaluates params in environments of the experiment's evaluation.

    Args:
      experiment: says how many episodes, and whether by index.
      evaluator: from `make_evaluator`.
      params: to evaluate.
      progress: called after each step with the number of episodes that ended, and of all.
      env: the first environments, if they are made already; the caller closes them.
      make_pool: makes environments, from the number of the first; by default the experiment's.

    Raises:
      WrongKindError: an evaluator of the user's own did not return an `Evaluation`.
    """
    cfg = experiment.evaluator
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
