"""What differs between two runs: ``rlstack diff RUN_A RUN_B``."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_config import options_of, read_config
from rlstack.programs.session.run_dir import RunDir

# Results that say how a run went; the others repeat the config or the machine's clock.
_RESULTS = (
    "eval_return_mean",
    "eval_return_std",
    "eval_episodes",
    "env_frames",
    "learner_steps",
    "wall_seconds",
    "frames_per_second",
    "ended_by",
    "version",
    "git_commit",
)


class Row(NamedTuple):
    """One entry of two runs; None where a run has none."""

    name: str
    left: Any
    right: Any


class Comparison(NamedTuple):
    """What differs between two runs."""

    config: list[Row]  # the fields of the configs that differ, by their names as options
    results: list[Row]  # entries of ``result.json`` that at least one of the runs has


def compare(left: str | os.PathLike[str], right: str | os.PathLike[str]) -> Comparison:
    """Returns what differs between the configs of two runs, and both results.

    Defaults of fields that an older config does not have are filled in first.

    Raises:
      ValueError: a directory does not hold a run.
    """
    directories = RunDir.open(left), RunDir.open(right)
    configs = [options_of(read_config(directory, several=True)) for directory in directories]
    names = list(dict.fromkeys(name for config in configs for name in config))
    fields = [Row(name, *(config.get(name) for config in configs)) for name in names]
    found = [read_result(directory) for directory in directories]
    results = [{} if result is None else result._asdict() for result in found]
    rows = [Row(name, *(result.get(name) for result in results)) for name in _RESULTS]
    return Comparison(
        [row for row in fields if row.left != row.right],
        [row for row in rows if row.left is not None or row.right is not None],
    )
