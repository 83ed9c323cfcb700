"""A search of options, and the file that describes it.

```
sweep.json           the experiment, its seeds, the values that are searched, the number of trials
study.db             the trials (SQLite), unless the sweep has another storage
trials/N/            the runs of trial N, a set of runs (rlstack.programs.study.trials)
logs/N               the output of trial N
best.json            the experiment with the best values
report.md, .html     all trials, once one has ended
workers/             the commands that work on the sweep, each with a lock
slurm.sh, slurm-*    the script of a Slurm job array, and its output
```
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from rlstack.checks import Checked
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.study import space
from rlstack.programs.study import trials as members
from rlstack.programs.study.space import Values
from rlstack.programs.study.trials import RunSet, with_option

FILE = members.SWEEP
_EVALUATIONS = 10  # evaluations per trial, if the experiment does not set when to evaluate


@dataclasses.dataclass(frozen=True)
class Sweep(Checked):
    """A search of the values of options that give the highest return."""

    base: Experiment
    """The experiment."""
    values: Mapping[str, Values]
    """The values that each searched option may take, by its name."""
    seeds: tuple[int, ...]
    """The seeds that each trial is trained with; its return is their mean."""
    trials: int = 50
    """The number of trials of all commands that work on the sweep."""
    prunes: bool = True
    """Whether a trial ends early if its evaluations are worse than the median of others."""
    storage: str = ""
    """The URL of the database of the trials; "" for SQLite in the directory of the sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "trials")
        if not self.values:
            raise ValueError(
                "Sweep: values must name one or more options. Give --space NAME LOW HIGH."
            )
        if "seed" in self.values:
            raise ValueError("Sweep: seed must not be searched; give the seeds with --seeds.")
        RunSet(self.base, self.seeds)  # checks the seeds
        for name, values in self.values.items():
            space.check(name, values, self.base)

    def runs(self, values: Mapping[str, Option]) -> RunSet:
        """Returns the runs of a trial, with evaluations during training if it may be pruned.

        Raises:
          ValueError: the experiment does not take these values together.
        """
        cfg = self.base.evaluator
        if self.prunes and not cfg.fixed_period:
            cfg = dataclasses.replace(cfg, period=max(1, self.base.frames // _EVALUATIONS))
        base = dataclasses.replace(self.base, evaluator=cfg)
        made = RunSet(base, self.seeds, {name: (value,) for name, value in values.items()})
        made.members()
        return made

    def with_values(self, values: Mapping[str, Option]) -> Experiment:
        """Returns the experiment with other values of the searched options."""
        experiment = self.base
        for name, value in values.items():
            experiment = with_option(experiment, name, value, "--space")
        return experiment

    def write(self, directory: Path) -> None:
        """Writes the file that `read` reads."""
        content = {
            "trials": self.trials,
            "seeds": self.seeds,
            "prunes": self.prunes,
            "storage": self.storage,
            "values": {name: space.to_tree(values) for name, values in self.values.items()},
            "experiment": json.loads(to_json(self.base)),
        }
        members.write_json(directory / FILE, content)


def read(directory: str | Path) -> Sweep:
    """Returns the sweep of a directory.

    Raises:
      RunDirError: the directory holds no sweep, or its file is damaged.
    """
    path = Path(directory) / FILE
    with members.reading_json(path, "a sweep", "rlstack sweep PRESET") as content:
        return Sweep(
            base=from_json(json.dumps(content["experiment"]), path),
            values={name: space.from_tree(tree) for name, tree in content["values"].items()},
            seeds=tuple(content["seeds"]),
            trials=content["trials"],
            prunes=content["prunes"],
            storage=content["storage"],
        )
