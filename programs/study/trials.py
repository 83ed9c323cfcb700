"""The runs of a set, and the file that describes the set.

```
set.json             the experiment, its seeds and the values of its varied options
NAME/                the directory of each run (rlstack.programs.session.run_dir)
report.md, .html     the returns with intervals, and the learning curves, once runs have finished
report/              its pictures
logs/NAME            the output of each run, if runs are processes
.lock                the command that works on the set
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.checks import ReportedError, described, fits, hints_of, is_config, kinds_of
from rlstack.programs.config.encoding import from_json, plain, to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir, RunDirError
from rlstack.references import nearest
from rlstack.storage import files

FILE = "set.json"
SWEEP = "sweep.json"  # the file of a sweep, whose trials are sets (rlstack.programs.study)


class FailedRunsError(ReportedError):
    """Runs of a set failed; the message names them and their errors. The others have finished."""


class Member(NamedTuple):
    """One run of a set."""

    name: str  # name of the run's directory
    values: dict[str, Option]  # value of each varied option, by name
    experiment: Experiment


@dataclasses.dataclass(frozen=True)
class RunSet:
    """An experiment with several seeds and values of its options."""

    base: Experiment
    seeds: tuple[int, ...]
    vary: Mapping[str, tuple[Option, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in {"seeds": self.seeds, **self.vary}.items():
            if not values or len(set(map(repr, values))) < len(values):
                raise ValueError(
                    f"RunSet: {name} must be one or more different values; got "
                    f"{' '.join(map(str, values)) or 'none'}."
                )
            if same := _same(values, _file_name):
                raise ValueError(
                    f"RunSet: {name} must have values with different names, because each run has a "
                    f"directory of this name; {same[0]!r} and {same[1]!r} are both "
                    f"{_file_name(same[0])}."
                )
        if same := _same(list(self.vary), _field_name):
            raise ValueError(
                f"RunSet: each option must be varied once; {same[0]} and {same[1]} are the same."
            )
        if "seed" in self.vary:
            raise ValueError("RunSet: seed must not be varied; give the seeds with --seeds.")

    def members(self) -> list[Member]:
        """Returns the runs: each combination of values with each seed, the seed varying fastest.

        Raises:
          ValueError: an option does not exist, or does not take a value.
        """
        found = []
        for combination in itertools.product(*self.vary.values()):
            values = dict(zip(self.vary, combination, strict=True))
            experiment = self.base
            for name, value in values.items():
                experiment = with_option(experiment, name, value)
            for seed in self.seeds:
                found.append(
                    Member(
                        ",".join([*self._texts(values), f"seed={seed}"]),
                        values,
                        dataclasses.replace(experiment, seed=seed),
                    )
                )
        return found

    def label(self, values: Mapping[str, Option]) -> str:
        """Returns the name of the runs with these values, for a report."""
        return " ".join([self.base.preset, *self._texts(values)])

    def _texts(self, values: Mapping[str, Option]) -> list[str]:
        pairs = zip(short_names(values), values.values(), strict=True)
        return [f"{name}={_file_name(value)}" for name, value in pairs]

    def write(self, directory: Path) -> None:
        """Writes the file that `read` reads."""
        content = {
            "seeds": self.seeds,
            "vary": self.vary,
            "experiment": json.loads(to_json(self.base)),
        }
        write_json(directory / FILE, content)


def is_set(directory: str | Path) -> bool:
    """Whether a directory holds a set of runs."""
    return (Path(directory) / FILE).is_file()


def read(directory: str | Path) -> RunSet:
    """Returns the set of runs of a directory.

    Raises:
      RunDirError: the directory holds no set, or its file is damaged.
    """
    path = Path(directory) / FILE
    with reading_json(path, "a set of runs", "rlstack train PRESET --seeds 1 2 3") as content:
        base = from_json(json.dumps(content["experiment"]), path)
        vary = {name: tuple(values) for name, values in content["vary"].items()}
        return RunSet(base, tuple(content["seeds"]), vary)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes the file of a set or a sweep."""
    files.write(path, json.dumps(content, indent=2, default=plain) + "\n")


@contextlib.contextmanager
def reading_json(path: Path, what: str, command: str) -> Iterator[dict[str, Any]]:
    """Yields the content of the file of a set or a sweep.

    Args:
      path: path of the file.
      what: the kind of content of the directory, such as "a population", for the error.
      command: the command that makes such a directory, for the error.

    Raises:
      RunDirError: the file cannot be read, or lacks an entry that the body needs.
    """
    try:
        yield files.read_json(path)
    except (OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RunDirError(
            f"{path.parent} must be the directory of {what}; {path.name} cannot be read: {error}. "
            f"{command} makes one."
        ) from error


def finished(directory: str | Path) -> dict[str, list[str | Path]]:
    """Returns the directories of a set's finished runs, by preset and values, for a report."""
    run_set, root = read(directory), Path(directory)
    found: dict[str, list[str | Path]] = {}
    for member in run_set.members():
        if read_result(RunDir(root / member.name)) is not None:
            found.setdefault(run_set.label(member.values), []).append(root / member.name)
    return found


def find(directory: str | Path) -> dict[str, list[str | Path]]:
    """Returns the directories of finished runs in a directory, by preset and values, for a report.

    Args:
      directory: a run's directory, a set's, or a folder that holds runs and sets at any depth.

    Raises:
      RunDirError: there is no run, or no run of a set has finished.
    """
    merged: dict[str, list[str | Path]] = {}
    for name, paths in _found(Path(directory)):
        merged.setdefault(name, []).extend(paths)
    return merged or {"": [RunDir.open(directory).path]}  # open says what a run directory is


def _found(root: Path) -> Iterator[tuple[str, list[str | Path]]]:
    if is_set(root):
        if not (groups := finished(root)):
            raise RunDirError(
                f"{root} must be a set with finished runs; none has finished. "
                f"rlstack train --resume {root} continues it."
            )
        yield from groups.items()
    elif RunDir(root).config.is_file():
        yield read_config(RunDir(root), several=True).preset, [root]
    else:
        are_trials = (root.parent / SWEEP).is_file()
        for path in sorted(root.glob("*/")):
            if not (are_trials and is_set(path) and not finished(path)):  # it failed or was pruned
                yield from _found(path)


def with_option(
    experiment: Experiment, name: str, value: Option, where: str = "--vary"
) -> Experiment:
    """Returns an experiment with another value of an option, such as ``agent.discount``.

    Args:
      experiment: the experiment.
      name: name of the option.
      value: the new value of the option.
      where: the argument that names the option, for errors.

    Raises:
      ValueError: there is no such option, or it takes no such value.
    """
    return _replaced(experiment, f"{where} {name}", _field_name(name).split("."), value)


def _replaced(config: Any, name: str, path: Sequence[str], value: Option) -> Any:
    field, *rest = path
    if isinstance(config, dict) and not rest:
        return {**config, field: _like(config.get(field), name, value)}
    hints = hints_of(config) if is_config(config) else {}
    if field not in hints:
        hint = nearest(field, hints) if hints else f"; {type(config).__name__} has no options"
        raise ValueError(f"{name}: there is no option {field!r}{hint}.")
    old = getattr(config, field)
    new = _replaced(old, name, rest, value) if rest else _fitted(hints[field], name, value)
    return dataclasses.replace(config, **{field: new})


def _fitted(hint: Any, name: str, value: Option) -> Option:
    """Returns the value in a type of the field; 1 becomes 1.0, and 8.0 becomes 8, where it must."""
    kinds = kinds_of(hint)
    if isinstance(value, float) and float not in kinds and int in kinds and value.is_integer():
        value = int(value)
    elif float in kinds and int not in kinds and fits(float, value):
        value = float(value)
    if not fits(hint, value):
        raise ValueError(f"{name}: must be {described(hint)}; got {value!r}.")
    return value


def _like(old: Option | None, name: str, value: Option) -> Option:
    """Returns a value for an entry of a dict, in the type of the one that it replaces."""
    return value if old is None else _fitted(type(old), name, value)


def short_names(names: Iterable[str]) -> list[str]:
    """Returns the last part of the name of each option, or the whole where others end like it."""
    every = list(names)
    lasts = [name.rpartition(".")[2] for name in every]
    return [
        last if lasts.count(last) == 1 else name for last, name in zip(lasts, every, strict=True)
    ]


def _same(values: Sequence[Any], key: Callable[[Any], str]) -> tuple[Any, Any] | None:
    """Returns the first two values with an equal key; None if all differ."""
    seen: dict[str, Any] = {}
    for value in values:
        if (text := key(value)) in seen:
            return seen[text], value
        seen[text] = value
    return None


def _field_name(name: str) -> str:
    """Returns the name of an option as the config has it, with its groups."""
    return name.replace("-", "_")


def _file_name(value: Option) -> str:
    """Returns a value as a part of a file's name."""
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in text)
