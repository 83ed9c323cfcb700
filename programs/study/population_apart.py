"""A population whose members are runs of their own, which copy each other by their checkpoints.

All members train to the frames of the next selection, one after the other or as processes. A copy
is then a new checkpoint of the member, with the params and the learner state of its source, from
which it goes on with new values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run import train as runs
from rlstack.programs.session.endings import is_complete
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.study import executors, pbt
from rlstack.programs.study.pbt import Lineage
from rlstack.programs.study.population import Population
from rlstack.storage import checkpoint, checkpoint_parts, jsonl

_RETURN = "actor/episode_return"
_LEARNED = ("['learner']['params']", "['learner']['learner_state']")


def train(
    population: Population,
    lineage: Lineage,
    root: Path,
    jobs: int,
    launch: executors.Launch | None,
    out: TextIO,
    over: Mapping[str, Result],
) -> list[Result | str]:
    """Trains all members to their ends.

    Members that another budget or a stop rule has ended before the budget of frames take no part in
    later selections.

    Args:
      population: the population.
      lineage: the state from which training continues; updated in place.
      root: the directory of the population, which contains the members' directories.
      jobs: number of members that train at the same time; 1 trains in this process.
      launch: starts processes, also for one job; see `executors.here`.
      out: receives a line for each event.
      over: the members that have nothing left to train, from `over`.

    Returns:
      The result of each member, or the error that made it fail since the last selection.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; everything is saved.
    """
    base, total = population.base, population.base.frames
    found: dict[str, Result | str] = dict(over)
    while True:
        if not lineage.copied:
            _copy(population, lineage, root)
        end = min((lineage.selections + 1) * population.period, total)
        names = [name for name in population.names if not _is_over(base, found.get(name))]
        # Each command counts all frames, updates and hours of the member.
        budgets = {"frames": end, "updates": base.updates, "hours": base.hours}
        found |= _trained(names, root, budgets, jobs, launch, out)
        outcomes = [found[name] for name in population.names]
        among = [i for i, outcome in enumerate(outcomes) if not _is_over(base, outcome)]
        if end >= total or not among:
            return outcomes
        _select(population, lineage, root, outcomes, among, out)


def _select(
    population: Population,
    lineage: Lineage,
    root: Path,
    outcomes: Sequence[Result | str],
    among: Sequence[int],
    out: TextIO,
) -> None:
    """Selects among members that have trained since the last selection; see `train`."""
    begin = lineage.selections * population.period
    scores = [
        -math.inf if isinstance(outcome, str) else _score(root / name, begin, before)
        for name, outcome, before in zip(population.names, outcomes, lineage.scores, strict=True)
    ]
    frames = [begin if isinstance(outcome, str) else outcome.env_frames for outcome in outcomes]
    copies = pbt.select(population, lineage.selections + 1, scores, frames, lineage.values, among)
    lineage.take(copies, scores)
    lineage.copied = False
    lineage.write(root)
    for copy in copies:
        print(
            f"member-{copy.member} copies member-{copy.source} at frame {copy.frames:,}",
            file=out,
            flush=True,
        )


def over(population: Population, root: Path, *, same_budget: bool) -> dict[str, Result]:
    """Returns the results of the members that have nothing left to train, by their names.

    Args:
      population: the population with its current budgets.
      root: the directory of the population.
      same_budget: True if the budgets are unchanged; see `is_complete`.
    """
    found = {name: read_result(RunDir(root / name)) for name in population.names}
    return {
        name: result
        for name, result in found.items()
        if result is not None and is_complete(population.base, result, same_budget=same_budget)
    }


def _is_over(base: Experiment, outcome: Result | str | None) -> bool:
    """Whether a member has nothing left to train. A failed member is not over: it may copy."""
    return isinstance(outcome, Result) and is_complete(base, outcome, same_budget=True)


def _trained(
    names: Sequence[str],
    root: Path,
    budgets: Mapping[str, float],
    jobs: int,
    launch: executors.Launch | None,
    out: TextIO,
) -> Iterator[tuple[str, Result | str]]:
    """Trains each member until a budget is spent; yields its name, and its result or its error."""
    if jobs > 1 or launch is not None:
        for name, failure in executors.run(
            root, names, budgets, jobs, out, launch or executors.here
        ):
            result = None if failure else read_result(RunDir(root / name))
            yield name, result or failure or "it left no result"
        return
    for name in names:
        try:
            with runs.earlier_run(root / name, budgets, may_restart=True) as opened:
                yield name, opened.result or runs.train_opened(opened, out)
        except Interrupted:
            raise
        except Exception as error:  # it ends this member only
            yield name, f"{type(error).__name__}: {error}"


def _score(path: Path, begin: int, before: float) -> float:
    """Returns the mean of the logged episode returns after a frame.

    Without any it is the score before, or -inf if there is none.
    """
    metrics = RunDir(path).metrics
    lines = jsonl.read_logs(metrics) if metrics.is_file() else []
    found = [line[_RETURN] for line in lines if line["env_frames"] > begin and _RETURN in line]
    score = float(np.mean(found)) if found else before
    return score if math.isfinite(score) else -math.inf


def _copy(population: Population, lineage: Lineage, root: Path) -> None:
    """Makes the copies of the last selection; repeating it changes nothing."""
    for copy in lineage.newest:
        with RunDir.open(root / population.names[copy.member]).claimed() as member:
            source = RunDir(root / population.names[copy.source])
            mine = checkpoint.latest(member.checkpoints)
            theirs = checkpoint.latest(source.checkpoints)
            # A member that failed before its first checkpoint starts again with the new values.
            if mine is not None and theirs is not None:
                checkpoint_parts.copy(mine, theirs, _LEARNED, member.check_claim)
            experiment = population.experiment(copy.member, lineage.values[copy.member])
            done = lineage.selections * population.period
            experiment = dataclasses.replace(experiment, frames=max(1, done))
            member.write_config(to_json(experiment))
    lineage.copied = True
    lineage.write(root)
