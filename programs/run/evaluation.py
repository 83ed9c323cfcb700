"""Evaluates a finished run, in its own environments or in variations of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlstack.acting.evaluator import Evaluation
from rlstack.checks import no_exits
from rlstack.programs.build.environments import (
    check_opponents,
    environment_spec,
    make_env,
    make_evaluation_env,
)
from rlstack.programs.build.evaluation import evaluate as evaluate_params
from rlstack.programs.build.evaluation import make_evaluator
from rlstack.programs.build.restored import Which, chosen_checkpoint, newest_checkpoint, read_params
from rlstack.programs.config.env_config import OpponentsConfig, Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.types import EnvSpec


@no_exits()
def evaluate(
    run_dir: str | Path,
    episodes: int | None = None,
    seed: int | None = None,
    against: Sequence[str | Path] = (),
    params: Which = "last",
    by_index: bool | None = None,
) -> Evaluation:
    """Evaluates the params of a run with the greedy policy.

    Args:
      run_dir: the directory of a run with a checkpoint.
      episodes: number of whole episodes; by default as many as at the end of training.
      seed: seed of the environments; by default the seed of the run.
      against: runs, or checkpoints of runs, that play the other places of a game of several agents;
        by default those of the run's own evaluation. The run's config says whether they are greedy.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      by_index: True to start episode i in the same way for all params, see `EvaluatorConfig`; by
        default the setting of the run.

    Raises:
      ValueError: there is no run or no checkpoint, or opponents do not fit.
    """
    directory = RunDir.open(run_dir)
    config = read_config(directory, several=True)
    if config.policies and against:
        raise ValueError(
            f"{directory.path} trained several policies, which play against one another; against "
            "must be empty."
        )
    experiment = _judged(config, episodes, seed, against, by_index)
    path = chosen_checkpoint(directory, experiment, params)
    if experiment.policies:
        return _evaluate_several(experiment, path, newest_checkpoint(directory, experiment))
    with make_evaluation_env(experiment) as env:
        restored = read_params(path, experiment, env.spec)
        evaluator = make_evaluator(experiment, env.spec)
        return evaluate_params(experiment, evaluator, restored, env=env)


def _evaluate_several(experiment: Experiment, path: Path, newest: Path) -> Evaluation:
    """Evaluates the policies of a checkpoint, each in games with the others.

    Earlier versions are read from the newest checkpoint: the best evaluation's one has none.
    """
    from rlstack.programs.build.policies.evaluation import SetEvaluator
    from rlstack.programs.build.policies.members import divide
    from rlstack.programs.build.policies.versions import read_versions

    division = divide(experiment)
    spec = environment_spec(experiment)
    restored = {
        member.name: read_params(path, member.experiment, spec, policy=member.name)
        for member in division.learning
    }
    versions = {
        member.name: read_versions(newest, member, restored[member.cfg.history.of])
        for member in division.members.values()
        if member.kind == "history"
    }
    return SetEvaluator(experiment, division, spec, versions).evaluate(restored)


def matrix(
    run_dir: str | Path,
    vary: Mapping[str, Sequence[Option]],
    episodes: int | None = None,
    seed: int | None = None,
    against: Sequence[str | Path] = (),
    params: Which = "last",
    by_index: bool | None = None,
) -> Iterator[tuple[dict[str, Option], Evaluation]]:
    """Evaluates the params of a run for each combination of environment options.

    Args:
      run_dir: the directory of a run with a checkpoint.
      vary: the values of each option, by its name.
      episodes: number of episodes per combination; see `evaluate`.
      seed: see `evaluate`.
      against: see `evaluate`.
      params: see `evaluate`.
      by_index: see `evaluate`.

    Yields:
      Each combination and its evaluation, the last option varying fastest.

    Raises:
      ValueError: the errors of `evaluate`; or an option does not exist, or changes the observations
        or actions. All combinations are checked before the first evaluation.
    """
    directory = RunDir.open(run_dir)
    base = _judged(read_config(directory), episodes, seed, against, by_index)
    path = chosen_checkpoint(directory, base, params)
    cells = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    experiments = [_with_options(base, cell) for cell in cells]
    specs = [_spec(experiment) for experiment in experiments]
    for cell, spec in zip(cells, specs, strict=True):
        if spec != specs[0]:
            raise ValueError(
                f"evaluation.matrix: the options must leave observations and actions as they are "
                f"with {cells[0]}; {cell} changes them."
            )
    restored, evaluator = read_params(path, base, specs[0]), make_evaluator(base, specs[0])
    for cell, experiment in zip(cells, experiments, strict=True):
        yield cell, evaluate_params(experiment, evaluator, restored)


def _judged(
    experiment: Experiment,
    episodes: int | None,
    seed: int | None,
    against: Sequence[str | Path],
    by_index: bool | None,
) -> Experiment:
    """Returns the experiment with these settings of its evaluation."""
    evaluator = experiment.evaluator
    if episodes is not None:
        # Every environment plays the same number of episodes.
        num_envs = math.gcd(episodes, evaluator.num_envs)
        evaluator = dataclasses.replace(evaluator, episodes=episodes, num_envs=num_envs)
    if by_index is not None:
        evaluator = dataclasses.replace(evaluator, by_index=by_index)
    # Opponents of training play no part here, and their checkpoints may have been deleted.
    env_cfg = dataclasses.replace(experiment.env, opponents=OpponentsConfig())
    if against:
        runs = tuple(map(str, against))
        eval_opponents = dataclasses.replace(env_cfg.eval_opponents, runs=runs, share=1.0)
        env_cfg = dataclasses.replace(env_cfg, eval_opponents=eval_opponents)
    seed = experiment.seed if seed is None else seed
    judged = dataclasses.replace(experiment, env=env_cfg, evaluator=evaluator, seed=seed)
    check_opponents(judged)
    return judged


def _with_options(experiment: Experiment, options: Mapping[str, Option]) -> Experiment:
    env = experiment.env
    eval_options = {**env.eval_options, **options}
    return dataclasses.replace(experiment, env=dataclasses.replace(env, eval_options=eval_options))


def _spec(experiment: Experiment) -> EnvSpec:
    cfg = dataclasses.replace(experiment.evaluation_env, num_envs=1, opponents=OpponentsConfig())
    with make_env(cfg, seed=0) as env:
        return env.spec
