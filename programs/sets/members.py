"""The runs of a set, and the file that describes the set.

```
set.json             the experiment, its seeds and the values of its varied options
NAME/                the directory of each run (programs.tracking.run_dir)
report.md, report/   the returns with intervals, and the learning curves, once runs have finished
logs/NAME            the output of each run, if runs are processes
.lock                the command that works on the set
```
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from programs.env_config import Option
from programs.experiment import Experiment, from_json, to_json
from programs.tracking.result import read_result
from programs.tracking.run_dir import RunDir, RunDirError
from rlstack.references import nearest

FILE = "set.json"


class Member(NamedTuple):
    """One run of a set."""

    name: str  # of its directory
    values: dict[str, Option]  # of the varied options, by name
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
        lasts = [name.rpartition(".")[2] for name in values]
        return [
            f"{last if lasts.count(last) == 1 else name}={_file_name(value)}"
            for last, (name, value) in zip(lasts, values.items(), strict=True)
        ]

    def write(self, directory: Path) -> None:
        """Writes the file that `read` reads."""
        content = {
            "seeds": self.seeds,
            "vary": self.vary,
            "experiment": json.loads(to_json(self.base)),
        }
        partial = directory / f".{FILE}"
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(directory / FILE)


def is_set(directory: str | Path) -> bool:
    """Whether a directory is that of a set of runs."""
    return (Path(directory) / FILE).is_file()


def read(directory: str | Path) -> RunSet:
    """Returns the set of a directory.

    Raises:
      RunDirError: there is none, or its file is damaged.
    """
    path = Path(directory) / FILE
    try:
        content = json.loads(path.read_text())
        base = from_json(json.dumps(content["experiment"]), path)
        vary = {name: tuple(values) for name, values in content["vary"].items()}
        return RunSet(base, tuple(content["seeds"]), vary)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise RunDirError(
            f"{directory} must be the directory of a set of runs; {path.name} cannot be read: "
            f"{error}. rlstack train PRESET --seeds 1 2 3 makes one."
        ) from error


def finished(directory: str | Path) -> dict[str, list[str | Path]]:
    """Returns the directories of a set's finished runs, by preset and values, for a report."""
    run_set, root = read(directory), Path(directory)
    found: dict[str, list[str | Path]] = {}
    for member in run_set.members():
        if read_result(RunDir(root / member.name)) is not None:
            found.setdefault(run_set.label(member.values), []).append(root / member.name)
    return found


def with_option(experiment: Experiment, name: str, value: Option) -> Experiment:
    """Returns an experiment with another value of an option, such as ``agent.discount``.

    Raises:
      ValueError: there is no such option, or it takes no such value.
    """
    return _replaced(experiment, name, name.replace("-", "_").split("."), value)


def _replaced(config: Any, name: str, path: Sequence[str], value: Option) -> Any:
    field, *rest = path
    if isinstance(config, dict) and not rest:
        return {**config, field: _fitted(config.get(field), name, value)}
    known = {f.name: None for f in dataclasses.fields(config)} if _is_config(config) else {}
    if field not in known:
        hint = nearest(field, known) if known else f"; {type(config).__name__} has no options"
        raise ValueError(f"--vary {name}: there is no option {field!r}{hint}.")
    old = getattr(config, field)
    new = _replaced(old, name, rest, value) if rest else _fitted(old, name, value)
    return dataclasses.replace(config, **{field: new})


def _is_config(config: Any) -> bool:
    return dataclasses.is_dataclass(config) and not isinstance(config, type)


def _fitted(old: Any, name: str, value: Option) -> Option:
    """Returns the value in the type of the one that it replaces."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(old, bool) or isinstance(value, bool):
        fits = old is None or (isinstance(old, bool) and isinstance(value, bool))
    elif isinstance(old, float):
        value, fits = float(value) if number else value, number
    elif isinstance(old, int):
        fits = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        value = int(value) if fits else value
    else:
        fits = old is None or (isinstance(old, str) and isinstance(value, str))
    if not fits:
        raise ValueError(
            f"--vary {name}: must be like {old!r}, a {type(old).__name__}; got {value!r}."
        )
    return value


def _file_name(value: Option) -> str:
    """Returns a value as a part of a file's name."""
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return "".join(c if c.isalnum() or c in "._+-" else "-" for c in text)
