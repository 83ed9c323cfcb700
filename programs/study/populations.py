"""Trains a population, resumes it, and reports on it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from rlstack.programs.config.env_config import Option
from rlstack.programs.run import train
from rlstack.programs.run.train import Opened
from rlstack.programs.session.display import ProgressDisplay, lasting
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir, new_directory
from rlstack.programs.study import executors, loops, population_apart, population_together
from rlstack.programs.study import population as populations
from rlstack.programs.study.pbt import Lineage, read_lineage
from rlstack.programs.study.population import Hyperparameters, Population
from rlstack.programs.study.space import Range
from rlstack.programs.study.study import check, reporting
from rlstack.programs.study.trials import FailedRunsError, short_names
from rlstack.programs.tools.report import report, tables

_ROOT = Path("runs")


class Ended(NamedTuple):
    """A member that has ended."""

    path: Path  # the member's directory
    values: Hyperparameters  # the member's values at the end
    result: Result | None  # None if it failed
    error: str = ""


def run(
    population: Population,
    directory: str | Path | None = None,
    *,
    jobs: int = 1,
    launch: executors.Launch | None = None,
    stream: TextIO | None = None,
) -> list[Ended]:
    """Trains a population, and writes a report.

    Args:
      population: the population to train.
      directory: a new or empty directory; by default a new one under ``runs/``.
      jobs: the number of members that train at the same time, each in a process of its own. With
        1, this process trains: members of the topology fused in one program, where JAX can trace
        the varied options, and others one after the other.
      launch: starts processes, also for one job; by default `executors.here`.
      stream: receives the progress display; standard error by default.

    Returns:
      The members, in the order of their numbers.

    Raises:
      ValueError: an option does not exist or does not take a value, or a config contradicts itself.
      FailedRunsError: members failed at the end, and the others have finished.
      Interrupted: SIGINT or SIGTERM was received; `resume` continues.
    """
    base = population.base
    if "jsonl" not in base.loggers:  # its lines have the scores
        base = dataclasses.replace(base, loggers=(*base.loggers, "jsonl"))
    pbt = dataclasses.replace(population.pbt, period=population.period)  # whatever the next budget
    population = dataclasses.replace(population, base=base, pbt=pbt)
    # All configs are checked before anything is written.
    experiments = [population.experiment(i, v) for i, v in enumerate(population.first_values())]
    executors.check_jobs(jobs)
    if jobs == 1 and launch is None:
        check(experiments[:1])
    if directory is None:
        directory = new_directory(_ROOT, f"{base.preset}-population")
    made = RunDir.create(directory, base.preset, base.seed)
    with made.claimed():
        population.write(made.path)
        _make_members(population, read_lineage(made.path, population), made.path)
        return _train(population, made.path, jobs, launch, stream)


def resume(
    directory: str | Path,
    budgets: Mapping[str, Any] | None = None,
    *,
    jobs: int = 1,
    launch: executors.Launch | None = None,
    stream: TextIO | None = None,
) -> list[Ended]:
    """Continues a population that was interrupted, or has finished and gets a new budget.

    Args:
      directory: the directory of the population.
      budgets: new budgets of each member, by name: frames, updates or hours.
      jobs: see `run`.
      launch: see `run`.
      stream: see `run`.

    Raises:
      ValueError: there is no such population, or one of the reasons of `run`.
    """
    executors.check_jobs(jobs)
    population = populations.read(directory)
    if budgets:
        base = dataclasses.replace(population.base, **budgets)
        population = dataclasses.replace(population, base=base)
    path = Path(directory).absolute()
    with RunDir(path).claimed():
        population.write(path)
        state = read_lineage(path, population)
        _make_members(population, state, path)
        over = population_apart.over(population, path, same_budget=not budgets)
        if len(over) == population.size:
            text = f"{path} has finished, and stays as it is. Give more --frames."
            print(text, file=lasting(stream), flush=True)
            return _ended(population, state, path, [over[name] for name in population.names])
        return _train(population, path, jobs, launch, stream, over)


def _make_members(population: Population, state: Lineage, root: Path) -> None:
    """Makes the missing members; an earlier command may have ended before it had made all."""
    for i, name in enumerate(population.names):
        if not RunDir(root / name).config.is_file():
            with train.new_run(population.experiment(i, state.values[i]), root / name):
                pass


def _train(
    population: Population,
    root: Path,
    jobs: int,
    launch: executors.Launch | None,
    stream: TextIO | None,
    over: Mapping[str, Result] = MappingProxyType({}),
) -> list[Ended]:
    out = lasting(stream)
    state = read_lineage(root, population)
    outcomes: Sequence[Result | Exception | str]
    if jobs == 1 and launch is None and _may_share_a_program(population):
        outcomes = _together(population, state, root, out)
    else:
        outcomes = population_apart.train(population, state, root, jobs, launch, out, over)
    ended = _ended(population, state, root, outcomes)
    failed = [one for one in ended if one.result is None]
    with reporting(out, have_failed=bool(failed)):
        _report(population, state, root, ended, out)
    if failed:
        errors = "\n".join(f"{one.path.name}: {one.error}" for one in failed)
        raise FailedRunsError(
            f"{len(failed)} of {len(ended)} members failed after the last selection.\n{errors}"
        )
    return ended


def _may_share_a_program(population: Population) -> bool:
    base = population.base
    if not base.layout.is_compiled or base.learner.devices:
        return False
    return all(
        loops.can_trace(base, name, _ends(space) if isinstance(space, Range) else space.values)
        for name, space in population.vary.items()
    )


def _ends(space: Range) -> tuple[Option, ...]:
    return (int(space.low), int(space.high)) if space.whole else (space.low, space.high)


def _together(
    population: Population, state: Lineage, root: Path, out: TextIO
) -> list[Result | Exception]:
    with _opened(population, state, root) as runs:
        base = population.base
        display = ProgressDisplay(
            base.frames * population.size,
            out,
            start_frames=sum(Progress.of(run.start_from).env_frames for run in runs),
            shows_progress="terminal" in base.loggers,
        )
        with display:
            return population_together.train(population, state, root, runs, display)


@contextlib.contextmanager
def _opened(population: Population, state: Lineage, root: Path) -> Iterator[list[Opened]]:
    with contextlib.ExitStack() as stack:
        yield [
            population_together.opened(
                population,
                i,
                state,
                stack.enter_context(RunDir.open(root / name).claimed()),
            )
            for i, name in enumerate(population.names)
        ]


def _ended(
    population: Population,
    state: Lineage,
    root: Path,
    outcomes: Sequence[Result | Exception | str],
) -> list[Ended]:
    found = []
    for name, values, outcome in zip(population.names, state.values, outcomes, strict=True):
        if isinstance(outcome, Result):
            found.append(Ended(root / name, values, outcome))
        else:
            text = outcome if isinstance(outcome, str) else f"{type(outcome).__name__}: {outcome}"
            found.append(Ended(root / name, values, None, text))
    return found


def _report(
    population: Population, state: Lineage, root: Path, ended: Sequence[Ended], out: TextIO
) -> None:
    """Writes the report of the members that have finished."""
    paths: list[str | Path] = [one.path for one in ended if one.result is not None]
    if not paths:
        return
    pictures: report.Pictures = "png" if importlib.util.find_spec("matplotlib") else "none"
    path = root / "report.md"
    made = report.make([("", {f"{population.base.preset} population": paths})])
    report.write_markdown(made, path, f"rlstack train --resume {root.resolve().name}", pictures)
    members = tables.markdown(_members(population, ended))
    text = f"\n## Members\n\nThey copied each other, so none can be repeated alone.\n\n{members}\n"
    if state.copies:
        text += f"\n## Lineage\n\n{tables.markdown(_copies(population, state))}\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
    best = max((one for one in ended if one.result is not None), key=_return)
    print(
        f"\n{members}\n\n{state.selections} selections, {len(state.copies)} copies; the best is "
        f"{best.path}\n{path}",
        file=out,
        flush=True,
    )


def _return(one: Ended) -> float:
    return -math.inf if one.result is None else one.result.eval_return_mean


def _members(population: Population, ended: Sequence[Ended]) -> tables.Table:
    columns = ["member", "greedy return", "frames", *short_names(population.vary)]
    rows = []
    for one in ended:
        result = one.result
        shown = ("failed", "") if result is None else (_text(_return(one)), f"{result.env_frames}")
        rows.append([one.path.name, *shown, *map(_text, one.values.values())])
    return columns, rows


def _copies(population: Population, state: Lineage) -> tables.Table:
    """Returns a row for each copy: when, who, of whom, and the values before and after."""
    names = short_names(population.vary)
    columns = ["selection", "frames", "member", "score", "copies", "score of it", *names]
    rows = []
    for copy in state.copies:
        changes = [
            f"{_text(before)} → {_text(after)}"
            for before, after in zip(copy.before.values(), copy.after.values(), strict=True)
        ]
        rows.append(
            [
                str(copy.selection),
                f"{copy.frames}",
                population.names[copy.member],
                _text(copy.score),
                population.names[copy.source],
                _text(copy.source_score),
                *changes,
            ]
        )
    return columns, rows


def _text(value: Option) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
