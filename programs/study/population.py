"""A population: an experiment, the hyperparameters that vary, and the rule of selection.

```
population.json      the experiment, the size, the spaces of the varied options, and the rule
lineage.json         the members' progress, and which members copied which (see `pbt`)
member-0/            the directory of each member, as any other run has it
report.md            returns, final values and lineage; pictures in report/
logs/                the output of each process, with --jobs
```
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlstack.checks import Checked
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.study import space
from rlstack.programs.study.space import Range
from rlstack.programs.study.trials import reading_json, with_option, write_json

FILE = "population.json"
_COMMAND = "rlstack train PRESET --population 8 --vary NAME LOW HIGH"
_MAY_VARY = ("agent.", "policy.", "normalisation.")

Hyperparameters = dict[str, Option]  # by the names of the options


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
class Population:
    """Members that train one experiment with hyperparameters of their own."""

    base: Experiment
    size: int
    vary: Mapping[str, space.Values]  # the values of each option that varies
    pbt: PbtConfig = PbtConfig()

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"Population: population must be at least 2; got {self.size}.")
        if not self.vary:
            raise ValueError(
                "Population: one or more options must vary. Add --vary NAME LOW HIGH, such as "
                "--vary agent.optimizer.learning_rate 1e-5 1e-2 log."
            )
        if self.base.policies or self.base.data:
            field = "policies" if self.base.policies else "data"
            raise ValueError(
                f"Population: {field} must be empty: members act, and train one policy each."
            )
        for name, values in self.vary.items():
            if not name.startswith(_MAY_VARY):
                raise ValueError(
                    f"Population: --vary must name an option of the agent, policy or normalisation "
                    f"group, because members copy each other's params; got {name}."
                )
            space.check(name, values, self.base, "--vary")

    @property
    def period(self) -> int:
        """Frames of each member between two selections."""
        return self.pbt.period or max(1, self.base.frames // 20)

    @property
    def names(self) -> list[str]:
        """The names of the members, which are those of their directories."""
        return [f"member-{i}" for i in range(self.size)]

    def rng(self, selection: int) -> np.random.Generator:
        """Returns the random numbers of a selection, which counts from 1; 0 is the start."""
        return np.random.default_rng([self.base.seed, selection])

    def first_values(self) -> list[Hyperparameters]:
        """Returns the values that each member begins with."""
        rng = self.rng(0)
        if self.pbt.start == "given":
            return [{name: given(self.base, name) for name in self.vary} for _ in range(self.size)]
        return [
            {name: draw(values, rng) for name, values in self.vary.items()}
            for _ in range(self.size)
        ]

    def experiment(self, index: int, values: Mapping[str, Option]) -> Experiment:
        """Returns the experiment of a member; their seeds are consecutive."""
        cfg = self.base.evaluator
        if cfg.period == "auto":
            # Members are compared by their returns in training. Each selection ends a command, for
            # which the period would be another.
            cfg = dataclasses.replace(cfg, period="off")
        experiment = dataclasses.replace(self.base, seed=self.base.seed + index, evaluator=cfg)
        for name, value in values.items():
            experiment = with_option(experiment, name, value)
        return experiment

    def write(self, directory: Path) -> None:
        """Writes the file that `read` reads."""
        content = {
            "size": self.size,
            "vary": {name: space.to_tree(values) for name, values in self.vary.items()},
            "pbt": dataclasses.asdict(self.pbt),
            "experiment": json.loads(to_json(self.base)),
        }
        write_json(directory / FILE, content)


def is_population(directory: str | Path) -> bool:
    """Whether a directory holds a population."""
    return (Path(directory) / FILE).is_file()


def read(directory: str | Path) -> Population:
    """Returns the population of a directory.

    Raises:
      RunDirError: the directory holds no population, or its file is damaged.
    """
    path = Path(directory) / FILE
    with reading_json(path, "a population", _COMMAND) as content:
        base = from_json(json.dumps(content["experiment"]), path)
        vary = {name: space.from_tree(tree) for name, tree in content["vary"].items()}
        return Population(base, content["size"], vary, PbtConfig(**content["pbt"]))


def given(experiment: Experiment, name: str) -> Option:
    """Returns the value of an option."""
    config: Any = experiment
    for field in name.replace("-", "_").split("."):
        config = config[field] if isinstance(config, dict) else getattr(config, field)
    found: Option = config
    return found


def draw(values: space.Values, rng: np.random.Generator) -> Option:
    """Returns a value of a range or one of the choices, each with the same probability."""
    if not isinstance(values, Range):
        return values.values[int(rng.integers(len(values.values)))]
    if values.log:
        number = float(np.exp(rng.uniform(np.log(values.low), np.log(values.high))))
    else:
        number = float(rng.uniform(values.low, values.high))
    return fitted(values, number)


def fitted(values: Range, number: float) -> float | int:
    """Returns the value of a range that is nearest to a number."""
    step = values.step or (1.0 if values.whole else 0.0)
    if step:
        steps = round((number - values.low) / step)
        number = values.low + step * min(max(steps, 0), int((values.high - values.low) / step))
    number = min(max(number, values.low), values.high)
    return round(number) if values.whole else number
