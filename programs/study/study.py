"""A study, its trials, and the directory that holds them.

```
study.json           the experiment, the seeds, the values of options, and the scheduler
NAME/                the directory of each trial: a run (rlstack.programs.session.run_dir) or, in a
                     search, a study of its seeds, trials/N/
report.md, .html     returns and values, and learning curves; pictures in report/
logs/NAME            the output of each trial that is a process
lineage.json         of a population: which members copied which (rlstack.programs.study.pbt)
study.db, workers/   of a search: Optuna's trials, and the commands that work on it
best.json            of a search: the experiment with the best values
slurm.sh, slurm-*    the script of a Slurm job array, and its output
.lock                the command that works on the study
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rlstack.checks import Checked, ReportedError
from rlstack.programs.config import options
from rlstack.programs.config.encoding import from_json, plain, to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.result import Result, read_result
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir, RunDirError
from rlstack.programs.study import space
from rlstack.programs.study.space import Range, Values
from rlstack.storage import files

FILE = "study.json"
_EARLIER = ("set.json", "sweep.json", "population.json")  # the files of version 0.1
_EVALUATIONS = 10  # evaluations in a trial of a search, if the experiment does not set their period
_MAY_CHANGE = ("agent.", "policy.", "normalisation.")  # in a run, if it copies another one's params


class FailedTrialsError(ReportedError):
    """Trials of a study failed; the message names them and their errors. The others have ended."""


class Trial(NamedTuple):
    """One choice of values, and what came of it: a run, or in a search a run for each seed."""

    name: str  # of its directory, relative to that of the study
    values: Mapping[str, Option]  # by the names of the options
    seed: int | None = None  # None in a search
    number: int = 0
    state: str = "running"  # complete, pruned, failed, running or interrupted
    value: float | None = None  # the greedy return, or the mean of those of its runs
    seconds: float = 0.0  # its duration; 0 if it has not ended
    error: str = ""  # why it failed
    result: Result | None = None  # of a run that is complete
    # The returns during training, by the numbers of the evaluations from 1; in a search only.
    evaluations: Mapping[int, float] = MappingProxyType({})

    def ended(self, outcome: Result | Exception | str) -> Trial:
        """Returns the trial with the result of its run, or with the error that ended it."""
        if isinstance(outcome, Result):
            value, seconds = outcome.eval_return_mean, outcome.wall_seconds
            return self._replace(state="complete", value=value, seconds=seconds, result=outcome)
        if isinstance(outcome, Exception):
            outcome = f"{type(outcome).__name__}: {outcome}"
        return self._replace(state="failed", error=outcome)


@dataclasses.dataclass(frozen=True)
class SearchConfig(Checked):
    """A search of the values with the highest return, with Optuna."""

    trials: int = 50
    """The number of trials of all commands that work on the study."""
    prunes: bool = True
    """Whether a trial ends early if its evaluations are worse than the median of others."""
    storage: str = ""
    """The URL of the database of the trials; "" for SQLite in the directory of the study."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "trials")


@dataclasses.dataclass(frozen=True)
class PbtConfig(Checked):
    """Population-based training, with --population."""

    period: int = 0
    """Frames of each member between two selections. 0 is a twentieth of the budget. Members need
    time to show what new values do; too long a period leaves few selections."""
    fraction: float = 0.25
    """The share of the members that copies others in a selection, and the share that is copied, at
    most 0.5: the worst ones copy members drawn from the best ones."""
    resample: float = 0.25
    """The probability that a varied option is drawn anew from its range after a copy, and not
    changed by a fifth. Raise it if the values at the start may be far off."""
    start: Literal["drawn", "given"] = "drawn"
    """The values that members begin with. drawn: each has its own, drawn from the ranges.
    given: those of the experiment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "period")
        self.require("fraction", 0 < self.fraction <= 0.5, "in (0, 0.5]")
        self.require("resample", 0 <= self.resample <= 1, "in [0, 1]")


@dataclasses.dataclass(frozen=True)
class Study(Checked):
    """An experiment that is trained with several seeds and values of its options."""

    base: Experiment
    """The experiment."""
    seeds: tuple[int, ...]
    """The seeds that each choice of values is trained with; those of a population's members."""
    values: Mapping[str, Values] = dataclasses.field(default_factory=dict)
    """The values that each option may take, by its name."""
    scheduler: SearchConfig | PbtConfig | None = None
    """What chooses the values of the trials; None trains all combinations, which is a grid."""

    def __post_init__(self) -> None:
        super().__post_init__()
        space.require_distinct("seeds", self.seeds, _file_name)
        names = [name.replace("-", "_") for name in self.values]
        if twice := [name for name in self.values if names.count(name.replace("-", "_")) > 1]:
            raise ValueError(
                f"Study: each option must be varied once; {' and '.join(twice)} are the same."
            )
        if "seed" in self.values:
            raise ValueError("Study: seed must not be varied; give the seeds with --seeds.")
        for name, values in self.values.items():
            if self.scheduler is not None:
                flag = "--space" if isinstance(self.scheduler, SearchConfig) else "--vary"
                space.check(name, values, self.base, flag)
            elif isinstance(values, Range):
                raise ValueError(f"Study: a grid must have single values of {name}; got a range.")
            if not isinstance(values, Range):
                space.require_distinct(name, values, _file_name if self.is_grid else repr)
        if not (self.is_grid or self.values):
            raise ValueError(
                "Study: one or more options must vary. Add --vary NAME LOW HIGH with --population, "
                "or --space NAME LOW HIGH with --search, such as --vary "
                "agent.optimizer.learning_rate 1e-5 1e-2 log."
            )
        if isinstance(self.scheduler, PbtConfig):
            self._check_population()

    def _check_population(self) -> None:
        if len(self.seeds) < 2:
            raise ValueError(f"Study: population must be at least 2; got {len(self.seeds)}.")
        if self.base.policies or self.base.data:
            field = "policies" if self.base.policies else "data"
            raise ValueError(
                f"Study: {field} must be empty: members act, and train one policy each."
            )
        for name in self.values:
            if not name.startswith(_MAY_CHANGE):
                raise ValueError(
                    f"Study: --vary must name an option of the agent, policy or normalisation "
                    f"group, because members copy each other's params; got {name}."
                )

    @property
    def is_grid(self) -> bool:
        """Whether the study trains all combinations of its values."""
        return self.scheduler is None

    def trials(self) -> list[Trial]:
        """Returns the trials of a grid: each combination with each seed, the seed varying fastest.

        Raises:
          ValueError: an option does not exist, or does not take a value.
        """
        assert self.is_grid
        found: list[Trial] = []
        for choice in itertools.product(*self.values.values()):  # type: ignore[arg-type]
            values: dict[str, Option] = dict(zip(self.values, choice, strict=True))
            texts = _texts(values)
            for seed in self.seeds:
                name = ",".join([*texts, f"seed={seed}"])
                found.append(Trial(name, values, seed, len(found)))
            self.experiment(values)
        return found

    def experiment(self, values: Mapping[str, Option], seed: int | None = None) -> Experiment:
        """Returns the experiment with these values, and with another seed if one is given.

        Raises:
          ValueError: an option does not exist, or does not take a value.
        """
        found, cfg = self.base, self.base.evaluator
        if isinstance(self.scheduler, PbtConfig) and cfg.period == "auto":
            # Members are compared by their returns in training. Each selection ends a command, for
            # which the period would be another.
            found = dataclasses.replace(found, evaluator=dataclasses.replace(cfg, period="off"))
        if seed is not None:
            found = dataclasses.replace(found, seed=seed)
        for name, value in values.items():
            flag = "--space" if isinstance(self.scheduler, SearchConfig) else "--vary"
            found = options.replaced(found, name, value, flag)
        return found

    def of_trial(self, values: Mapping[str, Option]) -> Study:
        """Returns the study that a trial of a search is: the runs of all seeds with its values.

        They are evaluated during training if the trial may be pruned.

        Raises:
          ValueError: the experiment does not take these values together.
        """
        cfg = self.base.evaluator
        prunes = isinstance(self.scheduler, SearchConfig) and self.scheduler.prunes
        if prunes and not cfg.fixed_period:
            cfg = dataclasses.replace(cfg, period=max(1, self.base.frames // _EVALUATIONS))
        base = dataclasses.replace(self.base, evaluator=cfg)
        made = Study(base, self.seeds, {name: (value,) for name, value in values.items()})
        made.trials()
        return made

    def with_budgets(self, budgets: Mapping[str, Any], trials: int | None = None) -> Study:
        """Returns the study with new budgets of its runs, or a new number of trials of a search.

        Raises:
          ValueError: a search gets budgets, or another study a number of trials.
        """
        if isinstance(self.scheduler, SearchConfig):
            if budgets:
                raise ValueError(
                    f"Study: a search compares trials of one budget, so {', '.join(budgets)} must "
                    "stay; give more --trials."
                )
            if trials is not None:
                scheduler = dataclasses.replace(self.scheduler, trials=trials)
                return dataclasses.replace(self, scheduler=scheduler)
        elif trials is not None:
            raise ValueError("Study: --trials is for searches; this study is none.")
        return dataclasses.replace(self, base=dataclasses.replace(self.base, **budgets))

    def label(self, values: Mapping[str, Option]) -> str:
        """Returns the name of the runs with these values, for a report."""
        return " ".join([self.base.preset, *_texts(values)])

    def write(self, directory: Path) -> None:
        """Writes the file that `read` reads."""
        kind = {SearchConfig: "optuna", PbtConfig: "pbt"}.get(type(self.scheduler), "grid")
        fields = dataclasses.asdict(self.scheduler) if self.scheduler else {}
        content = {
            "scheduler": {"kind": kind, **fields},
            "seeds": self.seeds,
            "values": {name: space.to_tree(values) for name, values in self.values.items()},
            "experiment": json.loads(to_json(self.base)),
        }
        text = json.dumps(content, indent=2, default=plain) + "\n"
        files.write(directory / FILE, text)


def is_study(directory: str | Path) -> bool:
    """Whether a directory holds a study."""
    return _file_of(Path(directory)).is_file()


def read(directory: str | Path) -> Study:
    """Returns the study of a directory, which an earlier version may have written.

    Raises:
      RunDirError: the directory holds no study, or its file is damaged.
    """
    RunDir(Path(directory)).fetch()
    path = _file_of(Path(directory))
    with reading(path):
        tree = files.read_json(path)
        base = from_json(json.dumps(tree["experiment"]), path)
        if path.name != FILE:
            tree = _today(path.name, tree, base)
        fields = dict(tree["scheduler"])
        kinds: dict[str, Any] = {"optuna": SearchConfig, "pbt": PbtConfig, "grid": lambda: None}
        values = {name: space.from_tree(found) for name, found in tree["values"].items()}
        return Study(base, tuple(tree["seeds"]), values, kinds[fields.pop("kind")](**fields))


def _today(name: str, tree: Mapping[str, Any], base: Experiment) -> dict[str, Any]:
    """Returns the content of an earlier version's file in the form of today's."""
    if name == "set.json":
        return {"scheduler": {"kind": "grid"}, "seeds": tree["seeds"], "values": tree["vary"]}
    if name == "sweep.json":
        given = {field.name: tree[field.name] for field in dataclasses.fields(SearchConfig)}
        return {**tree, "scheduler": {"kind": "optuna", **given}}
    seeds = range(base.seed, base.seed + tree["size"])
    return {"scheduler": {"kind": "pbt", **tree["pbt"]}, "seeds": seeds, "values": tree["vary"]}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of reading a file of a study into a `RunDirError`."""
    try:
        yield
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunDirError(
            f"{path.parent} must be the directory of a study; {path.name} cannot be read: {error}. "
            "rlstack sweep PRESET makes one, and rlstack train PRESET with --seeds, --vary or "
            "--population."
        ) from error


def _file_of(directory: Path) -> Path:
    """Returns the path of the file that describes a study; that of today if there is none."""
    earlier = (directory / name for name in _EARLIER)
    path = directory / FILE
    return path if path.is_file() else next((p for p in earlier if p.is_file()), path)


def finished(directory: str | Path) -> dict[str, list[str | Path]]:
    """Returns the directories of a grid's finished runs, by preset and values, for a report."""
    study, root = read(directory), Path(directory)
    found: dict[str, list[str | Path]] = {}
    for trial in study.trials():
        if read_result(RunDir(root / trial.name)) is not None:
            found.setdefault(study.label(trial.values), []).append(root / trial.name)
    return found


def find(directory: str | Path) -> dict[str, list[str | Path]]:
    """Returns the directories of finished runs in a directory, by preset and values, for a report.

    Args:
      directory: a run's directory, a study's, or a folder that holds runs and studies at any depth.

    Raises:
      RunDirError: there is no run, or no run of a grid has finished.
    """
    merged: dict[str, list[str | Path]] = {}
    for name, paths in _found(Path(directory)):
        merged.setdefault(name, []).extend(paths)
    return merged or {"": [RunDir.open(directory).path]}  # open says what a run directory is


def unfinished(directory: str | Path) -> Iterator[tuple[str, Path, Experiment]]:
    """Yields the runs in a directory that have no result, and those of a grid that have not begun.

    Returns:
      Of each run the preset and values, the directory and the experiment.
    """
    root = Path(directory)
    if is_study(root) and (study := read(root)).is_grid:
        for trial in study.trials():
            if read_result(RunDir(root / trial.name)) is None:
                experiment = study.experiment(trial.values, trial.seed)
                yield study.label(trial.values), root / trial.name, experiment
    elif RunDir(root).config.is_file():
        if read_result(RunDir(root)) is None:
            experiment = read_config(RunDir(root), several=True)
            yield experiment.preset, root, experiment
    else:
        for path in sorted(root.glob("*/")):
            yield from unfinished(path)


def _found(root: Path) -> Iterator[tuple[str, list[str | Path]]]:
    if is_study(root) and read(root).is_grid:
        if not (groups := finished(root)):
            raise RunDirError(
                f"{root} must be a study with finished runs; none has finished. "
                f"rlstack train --resume {root} continues it."
            )
        yield from groups.items()
    elif RunDir(root).config.is_file():
        yield read_config(RunDir(root), several=True).preset, [root]
    else:
        are_trials = is_study(root.parent) and not read(root.parent).is_grid
        for path in sorted(root.glob("*/")):
            if are_trials and is_study(path) and not finished(path):
                continue  # it failed or was pruned
            yield from _found(path)


def short_names(names: Iterable[str]) -> list[str]:
    """Returns the last part of the name of each option, or the whole where others end like it."""
    every = list(names)
    lasts = [name.rpartition(".")[2] for name in every]
    return [
        last if lasts.count(last) == 1 else name for last, name in zip(lasts, every, strict=True)
    ]


def _texts(values: Mapping[str, Option]) -> list[str]:
    pairs = zip(short_names(values), values.values(), strict=True)
    return [f"{name}={_file_name(value)}" for name, value in pairs]


def _file_name(value: Option) -> str:
    """Returns a value as a part of a file's name."""
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in text)
