"""How far a population is: the values of its members, and which of them copied whom."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlstack.programs.config.env_config import Option
from rlstack.programs.study.population import Hyperparameters, Population, draw, fitted
from rlstack.programs.study.space import Range, Values
from rlstack.programs.study.trials import reading_json
from rlstack.storage import files

FILE = "lineage.json"


@dataclasses.dataclass
class Lineage:
    """The state of a population; its file is written when all that it names is on disk."""

    values: list[Hyperparameters]
    """Of each member, now."""
    selections: int = 0
    """That have been made."""
    copies: list[Copy] = dataclasses.field(default_factory=list)
    """In all selections."""
    scores: list[float] = dataclasses.field(default_factory=list)
    """Of each member in the last selection; NaN before the first one."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    """The name of the checkpoint of each member to go on from; "" for its start. In the topology
    fused only."""
    iterations: int = 0
    """Since the last selection, in the topology fused."""
    returns: list[float] = dataclasses.field(default_factory=list)
    """The sum of each member's episode returns since then, likewise."""
    episodes: list[int] = dataclasses.field(default_factory=list)
    """Their number."""
    copied: bool = True
    """Whether the copies of the last selection are in the members' checkpoints. False if the
    command was killed in between; elsewhere than in fused."""

    @classmethod
    def new(cls, population: Population) -> Lineage:
        """Returns that of a population that has not begun."""
        size = population.size
        return cls(
            population.first_values(),
            scores=[math.nan] * size,
            checkpoints=[""] * size,
            returns=[0.0] * size,
            episodes=[0] * size,
        )

    def take(self, copies: list[Copy], scores: list[float]) -> None:
        """Takes a selection."""
        self.selections += 1
        self.scores = scores
        self.copies += copies
        for copy in copies:
            self.values[copy.member] = copy.after
        self.iterations = 0
        self.returns, self.episodes = [0.0] * len(self.values), [0] * len(self.values)

    @property
    def newest(self) -> list[Copy]:
        """The copies of the last selection."""
        return [copy for copy in self.copies if copy.selection == self.selections]

    def write(self, directory: Path) -> None:
        """Writes the file that `read` reads."""
        tree = dataclasses.asdict(self) | {"copies": [copy._asdict() for copy in self.copies]}
        files.write(directory / FILE, json.dumps(tree, indent=1) + "\n")


def read_lineage(directory: Path, population: Population) -> Lineage:
    """Returns the lineage of a directory, or that of a new population if it has none.

    Raises:
      RunDirError: its file is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        return Lineage.new(population)
    with reading_json(path, "a population", "rlstack train PRESET --population 8") as tree:
        return Lineage(**{**tree, "copies": [Copy(**copy) for copy in tree["copies"]]})


_FACTORS = (0.8, 1.2)


class Copy(NamedTuple):
    """A member that takes the params and the learner state of another one."""

    selection: int  # counts from 1
    frames: int  # of the member
    member: int
    source: int
    score: float  # of the member
    source_score: float
    before: Hyperparameters
    after: Hyperparameters  # those of the source, changed


def select(
    population: Population,
    selection: int,
    scores: Sequence[float],
    frames: Sequence[int],
    values: Sequence[Hyperparameters],
    among: Sequence[int],
) -> list[Copy]:
    """Returns which members copy which.

    Args:
      population: with the rule.
      selection: its number, from 1.
      scores: of each member, the mean of its recent episode returns; -inf for one that failed.
      frames: of each member.
      values: of each member.
      among: the members that take part.
    """
    rng = population.rng(selection)
    ordered = sorted(among, key=lambda i: (scores[i], i))
    count = max(1, int(len(ordered) * population.pbt.fraction))
    if len(ordered) < 2:
        return []
    best = ordered[-count:]
    copies = []
    for member in ordered[:count]:
        source = best[int(rng.integers(len(best)))]
        after = _changed(population, values[source], rng)
        if scores[source] > scores[member]:
            copies.append(
                Copy(
                    selection,
                    frames[member],
                    member,
                    source,
                    scores[member],
                    scores[source],
                    values[member],
                    after,
                )
            )
    return copies


def _changed(
    population: Population, values: Mapping[str, Option], rng: np.random.Generator
) -> Hyperparameters:
    """Returns values near the given ones or drawn anew, within their ranges."""
    return {
        name: _one(space, values[name], population.pbt.resample, rng)
        for name, space in population.vary.items()
    }


def _one(space: Values, value: Option, resample: float, rng: np.random.Generator) -> Option:
    if rng.random() < resample:
        return draw(space, rng)
    factor = _FACTORS[int(rng.integers(len(_FACTORS)))]
    if not isinstance(space, Range):  # choices have no neighbours
        return value
    number = float(value) * factor
    if space.whole and round(number) == value:  # a small integer would never change
        number = float(value) + (1 if factor > 1 else -1)
    return fitted(space, number)
